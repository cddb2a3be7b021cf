"""Which checkpoint a start goes on from, and which it must not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from shardwise import dist
from shardwise.checkpoint import layout, store
from shardwise.config.resolve import Resolved
from shardwise.dist import Ranks
from shardwise.errors import CheckpointError


def root_of(resolved: Resolved) -> Path:
    """Where a run keeps its checkpoints."""
    return Path(resolved.config.run.output_dir or "") / "checkpoints"


def checkpoint_to_resume(resolved: Resolved, identity: dict[str, Any], ranks: Ranks) -> Path | None:
    """The checkpoint to go on from, sound and of this run; None to begin anew. Called on every rank.

    `identity` is what the manifest says the curve depends on. Raises CheckpointError before a model loads.
    """
    wanted, origin = resolved.config.checkpoint.resume, resolved.origins["checkpoint.resume"]
    root = root_of(resolved)
    newest: Path | None = dist.gathered(layout.latest(root), dist.second_group())[0]  # rank 0's view of a shared disk
    if wanted == "never" and newest is not None:
        raise CheckpointError(f"{origin}: checkpoint.resume=never, but {newest} exists; choose another "
                              "run.output_dir or remove that folder")
    if wanted == "never" or (wanted == "auto" and newest is None):
        return None
    folder = store.find(root, ranks) if wanted == "auto" else _named(Path(wanted), newest, origin, ranks)
    if folder is not None:
        _refuse_foreign(folder, layout.read_meta(folder), identity)
    return folder


def _named(folder: Path, newest: Path | None, origin: str, ranks: Ranks) -> Path:
    """A checkpoint given by name: sound, and with no newer one in its way."""
    step = layout.read_meta(folder)["step"]
    if problems := store.examine(folder, ranks):
        raise CheckpointError(f"{origin}: checkpoint.resume={folder} is broken: {'; '.join(problems[:3])}")
    if newest is not None and layout.step_of(newest) > step:
        raise CheckpointError(f"{origin}: checkpoint.resume={folder} is of step {step}, but {newest} is newer and "
                              "the next start would go on from it; remove it or choose another run.output_dir")
    return folder


def _refuse_foreign(folder: Path, meta: dict[str, Any], own: dict[str, Any]) -> None:
    """A checkpoint goes on only where the same curve would be computed; how the work is split is free."""
    differing = [f"{key} was {json.dumps(meta['curve'].get(key))[:200]} and is {json.dumps(value)[:200]}"
                 for key, value in json.loads(json.dumps(own["curve"])).items() if meta["curve"].get(key) != value]
    if differing:
        raise CheckpointError(f"{folder} belongs to another run: {'; '.join(differing)}. "
                              "Choose another run.output_dir, or put the settings back")
