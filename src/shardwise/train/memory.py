"""Out of memory: the same step in smaller micro-batches. The global batch, and with it the curve, stays the same.

The limit in force is kept in RUN/micro_batch.json, so that a later start does not have to find it out again.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import re
from pathlib import Path
from typing import Any

import torch

from shardwise.data.steps.feed import Rows
from shardwise.errors import OutOfMemory, TrainingError
from shardwise.outcome import MICRO_BATCH

# Of the CPU allocator, the driver and cuBLAS, which raise a plain RuntimeError.
WORDS = re.compile(r"out of memory|can't allocate memory|not enough memory|CUBLAS_STATUS_ALLOC_FAILED", re.IGNORECASE)
WAY_OUT = ("use a higher ZeRO stage (strategy=zero3), offload=optimizer or offload=params, "
           "model.gradient_checkpointing=true, or a shorter data.max_length")


def is_out_of_memory(error: BaseException) -> bool:
    """True for what torch raises when an allocation fails, on a GPU or in host memory."""
    return isinstance(error, torch.OutOfMemoryError) or (isinstance(error, RuntimeError) and
                                                         bool(WORDS.search(str(error))))


def release() -> None:
    """Give back what a failed micro-step held, as far as nothing refers to it any more."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


class MicroBatchLimit:
    """Most tokens one rank runs at once: what the recipe asks for, halved as often as memory ran out."""

    def __init__(self, asked: int, *, folder: Path) -> None:
        self.asked, self.path = asked, folder / MICRO_BATCH
        self.tokens = _remembered(self.path, asked)

    def of(self, rows: Rows, ids: list[int]) -> int:
        """The limit for splitting some examples; never less than the longest of them."""
        return max(self.tokens, int(rows.lengths[ids].max(initial=0)))

    def halve(self, rows: Rows, ids: list[int], *, step: int) -> None:
        """Half of what these examples were split by. Raises TrainingError when one of them alone did not fit."""
        used = self.of(rows, ids)
        longest = max(ids, key=lambda i: (int(rows.lengths[i]), -i))
        if used == int(rows.lengths[longest]):
            raise TrainingError(
                f"step {step}: {rows.place(longest)} has {used:,} tokens and does not fit into memory even alone in a "
                f"micro-batch; the weights were not moved and the last checkpoint is intact. To make room, {WAY_OUT}")
        self.tokens = used // 2

    def remember(self) -> None:
        """Write the limit beside the run's checkpoints; one rank does it."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        beside = self.path.with_name(f"{MICRO_BATCH}.{os.getpid()}.part")
        beside.write_text(json.dumps({"asked": self.asked, "max_tokens_per_micro_batch": self.tokens}))
        os.replace(beside, self.path)

    def start_again(self, rows: Rows, ids: list[int], *, step: int) -> OutOfMemory:
        """The error to end with where the step cannot be tried again in this process; the next start will be smaller.

        Raises TrainingError when one example alone did not fit.
        """
        used = self.of(rows, ids)
        self.halve(rows, ids, step=step)
        self.remember()
        return OutOfMemory(
            f"{OutOfMemory.opening} {step} with micro-batches of up to {used:,} tokens, in the middle of an exchange "
            f"with the other ranks; the weights were not moved. A new start goes on from the last checkpoint with "
            f"{self.tokens:,} (it is in {self.path}; to have it from the beginning set "
            f"batch.max_tokens_per_micro_batch={self.tokens})")


def _remembered(path: Path, asked: int) -> int:
    """The limit of an earlier session, unless the recipe asks for another one than it did then."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        kept: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if kept["asked"] == asked:
            return max(1, min(asked, int(kept["max_tokens_per_micro_batch"])))
    return asked
