"""Trained weights from a checkpoint of any strategy and world size, in one process without a process group."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from shardwise.checkpoint import layout
from shardwise.checkpoint.slices import Saved, Slice
from shardwise.checkpoint.state import WEIGHT
from shardwise.errors import CheckpointError

PREFIX = f"{WEIGHT}/"
Shapes = Mapping[str, tuple[int, ...]]


def check_files(checkpoint: Path, meta: dict[str, Any]) -> None:
    """Compare every file with the checksum in the checkpoint's meta. Raises CheckpointError naming the file."""
    for problem in layout.unsound(checkpoint, sorted(meta["files"].items())):
        raise CheckpointError(f"{problem}; choose another checkpoint")


def read(checkpoint: Path, wanted: Shapes, *, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The fp32 master weights in `dtype` (rounded to nearest, ties to even), with the shapes `wanted`.

    Beside the result no more than one rank's slice of one tensor is in memory. Raises CheckpointError when a
    weight is missing, too much, of another size, incomplete, or not finite in `dtype`.
    """
    saved = Saved(checkpoint / layout.STATE)
    sizes = {name.removeprefix(PREFIX): (size,) for name, size in saved.sizes.items() if name.startswith(PREFIX)}
    refuse_unlike(sizes, {name: (math.prod(shape),) for name, shape in wanted.items()}, str(checkpoint))
    flat = {name: torch.empty(math.prod(shape), dtype=dtype) for name, shape in wanted.items()}
    saved.read({PREFIX + name: Slice(tensor, tensor.numel(), 0) for name, tensor in flat.items()})
    weights = {name: flat[name].view(shape) for name, shape in wanted.items()}
    for name, tensor in weights.items():
        if not tensor.isfinite().all():
            raise CheckpointError(f"{checkpoint}: {name} holds values that are not finite"
                                  f"{' in fp16, whose largest is 65504; use --dtype bf16' * (dtype == torch.float16)}")
    return weights


def refuse_unlike(found: Shapes, wanted: Shapes, place: str) -> None:
    """Every weight must be there with its shape, and none besides. Raises CheckpointError naming the first."""
    for name, shape in wanted.items():
        if name not in found:
            raise CheckpointError(f"{place}: the weight {name} {list(shape)} is missing")
        if tuple(found[name]) != tuple(shape):
            raise CheckpointError(f"{place}: the weight {name} is {list(found[name])}, not {list(shape)}")
        if math.prod(shape) == 0:
            raise CheckpointError(f"{place}: the weight {name} {list(shape)} has no elements")
    if more := sorted(set(found) - set(wanted)):
        raise CheckpointError(f"{place}: the model has no weight {more[0]}")
