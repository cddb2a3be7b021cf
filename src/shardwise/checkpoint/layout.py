"""Names and states of checkpoint folders. Reads the disk, changes nothing.

A checkpoint is `checkpoints/step-00000300/`. It is complete when it holds `meta.json`, which is written last, inside a
`.part` folder that is then renamed; it is sound when every file that `meta.json` lists has the checksum listed.
Anything else in the folder is ignored.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from shardwise.errors import CheckpointError

META = "meta.json"
STATE = "state"
FORMAT = 2
NAME = re.compile(r"step-(\d{8,})\Z")


def folder_name(step: int) -> str:
    """`step-00000300`."""
    return f"step-{step:08d}"


def step_of(folder: Path) -> int:
    """300 for `step-00000300`."""
    match = NAME.fullmatch(folder.name)
    assert match, folder
    return int(match[1])


def complete(root: Path) -> list[Path]:
    """Complete checkpoints beneath `root`, oldest step first."""
    if not root.is_dir():
        return []
    found = [path for path in root.iterdir()
             if NAME.fullmatch(path.name) and path.is_dir() and (path / META).is_file()]
    return sorted(found, key=step_of)


def latest(root: Path) -> Path | None:
    """The newest complete checkpoint beneath `root`, by step number; whether it is sound is another question."""
    found = complete(root)
    return found[-1] if found else None


def read_meta(folder: Path) -> dict[str, Any]:
    """What a checkpoint says of itself. Raises CheckpointError when it is not one, or not one of this format."""
    try:
        meta = json.loads((folder / META).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{folder}: no complete checkpoint there (no {META}); give a folder such as "
                              f"RUN/checkpoints/{folder_name(300)}") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder / META}: cannot be read: {error}") from None
    if not isinstance(meta, dict) or not isinstance(meta.get("files"), dict) or "step" not in meta:
        raise CheckpointError(f"{folder / META}: not what this version of shardwise writes")
    if meta.get("format") != FORMAT:
        raise CheckpointError(f"{folder}: checkpoint format {meta.get('format')}, this version reads {FORMAT}")
    return meta


def checksum(path: Path) -> str:
    """SHA-256 of a file, hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def unsound(folder: Path, files: Iterable[tuple[str, str]]) -> list[str]:
    """One sentence for each (relative path, checksum) that is not so."""
    problems = []
    for name, expected in files:
        try:
            if checksum(folder / name) != expected:
                problems.append(f"{folder / name} has changed since it was written")
        except FileNotFoundError:
            problems.append(f"{folder / name} is missing")
        except OSError as error:
            problems.append(f"{folder / name} cannot be read: {error}")
    return problems


def superfluous(root: Path, *, keep: int, keep_best: int) -> list[Path]:
    """Complete checkpoints that are neither among the newest `keep` nor the `keep_best` of lowest evaluation loss."""
    found = complete(root)
    kept = set(found[-keep:]) | set(best(root)[:keep_best])
    return [folder for folder in found if folder not in kept]


def best(root: Path) -> list[Path]:
    """Complete checkpoints that were evaluated, lowest loss first; of equal ones the earlier."""
    scored = []
    for folder in complete(root):
        try:
            loss = read_meta(folder).get("eval_loss")
        except CheckpointError:
            continue
        if loss is not None:
            scored.append((loss, step_of(folder), folder))
    return [folder for _, _, folder in sorted(scored)]
