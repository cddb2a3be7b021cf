"""Names and states of checkpoint folders. Reads the disk, changes nothing.

A checkpoint is `checkpoints/step-00000300/`. It is complete when it holds `meta.json`, which is written last,
inside a `.part` folder that is then renamed; anything else in the folder is ignored.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from shardwise.errors import CheckpointError

META = "meta.json"
NAME = re.compile(r"step-(\d{8,})\Z")


def folder_name(step: int) -> str:
    """`step-00000300`."""
    return f"step-{step:08d}"


def complete(root: Path) -> list[Path]:
    """Complete checkpoints beneath `root`, oldest step first."""
    if not root.is_dir():
        return []
    found = [(int(match[1]), path) for path in root.iterdir()
             if (match := NAME.fullmatch(path.name)) and path.is_dir() and (path / META).is_file()]
    return [path for _, path in sorted(found)]


def latest(root: Path) -> Path | None:
    """The newest complete checkpoint beneath `root`, by step number."""
    found = complete(root)
    return found[-1] if found else None


def read_meta(folder: Path) -> dict[str, Any]:
    """What a checkpoint says of itself. Raises CheckpointError when it is not one or not complete."""
    try:
        meta = json.loads((folder / META).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{folder}: no complete checkpoint there (no {META}); give a folder such as "
                              f"RUN/checkpoints/{folder_name(300)}") from None
    except (OSError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{folder / META}: cannot be read: {error}") from None
    return dict(meta)
