"""Files that come with shardwise: from the checkout when there is one, from the wheel otherwise."""

from __future__ import annotations

from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1]


def shipped(folder: str, name: str) -> Path:
    """Path of a shipped file such as `ds_configs/zero2.json`. Raises FileNotFoundError."""
    for root in (PACKAGE.parents[1], PACKAGE / "shipped"):
        if (root / folder / name).is_file():
            return root / folder / name
    raise FileNotFoundError(f"{folder}/{name} is neither in the checkout nor in the installed package")
