"""Publish a checkpoint so that it is complete or absent; find the newest sound one; bring it back exactly.

All functions are called by every rank, together, and all ranks come to the same end.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch

from shardwise import dist
from shardwise.checkpoint import layout, rng, slices, state
from shardwise.checkpoint.pieces import Holder
from shardwise.checkpoint.slices import Slice
from shardwise.config.schema import CheckpointConfig
from shardwise.dist import Ranks
from shardwise.errors import CheckpointError, SaveError

log = logging.getLogger("shardwise")
T = TypeVar("T")


class Saver:
    """Publishes the checkpoints of a run; with `async_save`, from a copy in memory while training goes on."""

    def __init__(self, root: Path, holder: Holder, ranks: Ranks, config: CheckpointConfig) -> None:
        self.root, self.holder, self.ranks, self.config = root, holder, ranks, config
        self.saved_at = time.monotonic()
        self.group = dist.second_group()
        self.failures = 0
        """Saves that failed since the last one that did not; the same on every rank."""
        self._thread: threading.Thread | None = None
        self._problem: SaveError | None = None
        self._copies: dict[str, torch.Tensor] = {}

    def save(self, step: int, meta: dict[str, Any], *, must: bool) -> float:
        """Publish `root/step-XXXXXXXX`, then remove what is superfluous; returns the seconds the caller waited.

        A save that fails is a warning; one that fails right after another, or with `must`, raises SaveError on every
        rank. Earlier checkpoints stay as they are. With `must`, it is complete when this returns.
        """
        began = time.perf_counter()
        self.settle()
        captured, generators = state.captured(self.holder), rng.capture()
        meta = {"format": layout.FORMAT, "step": step, "shapes": self.holder.shapes(), **meta}
        if self.config.async_save and not must:
            copies = self._copied(captured)
            self._thread = threading.Thread(target=self._publish, args=(step, copies, generators, meta))
            self._thread.start()
        else:
            self._publish(step, captured, generators, meta)
            self.settle(must=must)
        self.saved_at = time.monotonic()
        return time.perf_counter() - began

    def overdue(self) -> bool:
        """Whether, by this rank's clock, `every_minutes` have passed since the last save or the start."""
        minutes = self.config.every_minutes
        return minutes is not None and time.monotonic() - self.saved_at >= 60 * minutes

    def settle(self, *, must: bool = False) -> None:
        """Wait for a save under way. Raises SaveError as `save` says."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        problem, self._problem = self._problem, None
        if problem is None:
            return
        if must or self.failures > 1:
            raise problem
        if self.ranks.main:
            log.warning("%s; training goes on, and stops if the next checkpoint cannot be written either", problem)

    def load(self, folder: Path, *, seed: int) -> dict[str, Any]:
        """Bring weights, optimizer state and random generators back; returns the checkpoint's meta data."""
        self.settle()
        meta = layout.read_meta(folder)
        state.restore(folder / layout.STATE, self.holder)
        own = folder / rng.file_name(self.ranks.rank)
        if meta["world_size"] == self.ranks.world_size and own.is_file():
            rng.restore(own)
        else:  # other ranks, other shares of the batch: there is no state to go on with
            rng.reseed(seed, meta["step"], self.ranks.rank)
        return meta

    def _copied(self, captured: dict[str, Slice]) -> dict[str, Slice]:
        """The same in host memory of our own, which is kept for the next time."""
        copies = {}
        for name, piece in captured.items():
            buffer = self._copies.get(name)
            if buffer is None:
                buffer = torch.empty(piece.tensor.shape, dtype=piece.tensor.dtype, pin_memory=piece.tensor.is_cuda)
                self._copies[name] = buffer
            buffer.copy_(piece.tensor, non_blocking=True)
            copies[name] = Slice(buffer, piece.size, piece.start)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return copies

    def _publish(self, step: int, captured: dict[str, Slice], generators: dict[str, Any], meta: dict[str, Any]) -> None:
        """All of a save, on whichever thread; the outcome is left for `settle`."""
        final = self.root / layout.folder_name(step)
        part = final.with_name(final.name + ".part")
        try:
            self._together(lambda: self._prepare(part), final)
            self._together(lambda: slices.write(part / layout.STATE, captured, group=self.group), final)
            sums = self._together(lambda: self._seal(part, generators), final)
            everyone = dist.gathered(sums, self.group)
            files = {name: value for found in everyone for name, value in found.items()}
            self._together(lambda: self._rename(part, final, {**meta, "files": files}), final)
            self.failures = 0
        except Exception as error:  # on a thread of its own nobody else would hear of it
            self.failures += 1
            self._problem = error if isinstance(error, SaveError) else SaveError(
                f"{final}: could not be written: {type(error).__name__}: {error}; earlier checkpoints are intact")
            if self.ranks.main:
                shutil.rmtree(part, ignore_errors=True)  # it may be what the space is needed for

    def _prepare(self, part: Path) -> None:
        if self.ranks.main:
            shutil.rmtree(part, ignore_errors=True)
            (part / layout.STATE).mkdir(parents=True)

    def _seal(self, part: Path, generators: dict[str, Any]) -> dict[str, str]:
        """Write this rank's generators, make all of its files durable, and sum them up."""
        own = part / rng.file_name(self.ranks.rank)
        rng.write(own, generators)
        files = [own, *slices.own_files(part / layout.STATE, self.ranks.rank)]
        for path in files:
            sync(path)
        return {str(path.relative_to(part)): layout.checksum(path) for path in files}

    def _rename(self, part: Path, final: Path, meta: dict[str, Any]) -> None:
        if not self.ranks.main:
            return
        path = part / layout.META
        path.write_text(json.dumps(meta, indent=2), encoding="utf-8")
        for entry in (path, part / layout.STATE, part):
            sync(entry)
        remove(final)
        os.replace(part, final)
        sync(self.root)
        for old in layout.superfluous(self.root, keep=self.config.keep, keep_best=self.config.keep_best):
            remove(old)

    def _together(self, stage: Callable[[], T], target: Path) -> T:
        """Run a stage on every rank; if it fails on any, all of them raise."""
        problem: Exception | None = None
        try:
            result = stage()
        except Exception as error:  # whatever it is, the others wait
            problem = error
        failed = dist.gathered(None if problem is None else f"{type(problem).__name__}: {problem}", self.group)
        first = next(filter(None, failed), None)
        if first is not None:
            raise SaveError(f"{target}: could not be written: {first}; earlier checkpoints are intact")
        return result


def find(root: Path, ranks: Ranks) -> Path | None:
    """The newest checkpoint beneath `root` that is complete and sound; None when there is none at all.

    What is broken is named in the log. Raises CheckpointError when there are checkpoints and all of them are broken.
    """
    group = dist.second_group()
    candidates: list[Path] = dist.gathered(layout.complete(root), group)[0]  # rank 0's view of a shared disk
    for folder in reversed(candidates):
        problems = examine(folder, ranks)
        if not problems:
            return folder
        if ranks.main:
            log.warning("%s is broken and left aside: %s", folder, "; ".join(problems[:3]))
    if candidates:
        raise CheckpointError(f"every checkpoint in {root} is broken (see above); remove that folder to begin anew")
    return None


def examine(folder: Path, ranks: Ranks) -> list[str]:
    """What is wrong with a checkpoint, on every rank; each of them reads a share of the files."""
    try:
        listed = sorted(layout.read_meta(folder)["files"].items())
        problems = layout.unsound(folder, listed[ranks.rank::ranks.world_size])
    except CheckpointError as error:
        problems = [str(error)]
    return list(dict.fromkeys(problem for found in dist.gathered(problems, dist.second_group()) for problem in found))


def remove(folder: Path) -> None:
    """Remove a checkpoint so that half of it is never taken for a whole one."""
    (folder / layout.META).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def sync(path: Path) -> None:
    """Make a file or a folder's list of names durable."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
