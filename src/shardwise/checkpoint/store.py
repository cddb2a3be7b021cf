"""Write a checkpoint so that it is complete or absent, and load it so that the run goes on exactly."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from shardwise import dist
from shardwise.checkpoint import layout
from shardwise.errors import SaveError

RNG = "rng-{rank:05d}.pt"


class Shards(Protocol):
    """The part of a strategy that knows its own files (checkpoint/shards.py)."""

    def save(self, folder: Path) -> None:
        """Write weights and optimizer state; called on every rank."""

    def load(self, folder: Path) -> None:
        """Read them back in place; called on every rank."""


def save(root: Path, step: int, shards: Shards, meta: dict[str, Any], *, rank: int, keep: int) -> Path:
    """Publish `root/step-XXXXXXXX` on all ranks together, then remove all but the newest `keep`.

    Raises SaveError on every rank when any of them could not write; earlier checkpoints stay as they are.
    """
    final = root / layout.folder_name(step)
    part = final.with_name(final.name + ".part")

    def prepare() -> None:
        if rank == 0:
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir(parents=True)

    def write() -> None:
        shards.save(part)
        _write_durably(part / RNG.format(rank=rank), lambda path: torch.save(_rng_state(), path))

    def publish() -> None:
        if rank == 0:
            _write_durably(part / layout.META, lambda path: path.write_text(json.dumps(meta, indent=2)))
            shutil.rmtree(final, ignore_errors=True)
            os.replace(part, final)
            _sync_folder(root)
            for old in layout.complete(root)[:-keep]:
                shutil.rmtree(old)

    for stage in (prepare, write, publish):
        _together(stage, final)
    return final


def load(folder: Path, shards: Shards, *, rank: int) -> None:
    """Bring weights, optimizer state and this rank's random generators back."""
    shards.load(folder)
    own = folder / RNG.format(rank=rank)
    if own.is_file():  # absent only for ranks that the saving run did not have
        _set_rng_state(torch.load(own, weights_only=True))


def _together(stage: Callable[[], None], target: Path) -> None:
    """Run a stage on every rank; if it fails on any, all of them raise."""
    problem: OSError | RuntimeError | None = None
    try:
        stage()
    except (OSError, RuntimeError) as error:
        problem = error
    device = "cuda" if torch.cuda.is_available() else "cpu"
    failed = dist.sum_over_ranks(torch.tensor([float(problem is not None)], device=device)).item()
    if failed:
        raise SaveError(f"{target}: could not be written{f': {problem}' if problem else ' by another rank'}; "
                        "earlier checkpoints are intact")


def _write_durably(path: Path, write: Callable[[Path], object]) -> None:
    write(path)
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _rng_state() -> dict[str, Any]:
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    version, internal, gauss = random.getstate()
    return {"torch": torch.get_rng_state(),
            "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
            "numpy": [kind, torch.from_numpy(np.asarray(keys).astype(np.int64)), position, has_gauss, cached],
            "python": [version, list(internal), gauss]}


def _set_rng_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    if torch.cuda.is_available() and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])
    kind, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
