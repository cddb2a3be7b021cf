"""Trained weights from a checkpoint of any strategy and world size, in one process without a process group."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from shardwise.checkpoint import layout
from shardwise.errors import CheckpointError

STATE, PREFIX = "state", "weight/"
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
    import torch.distributed.checkpoint as dcp

    # Read once: torch would look through the headers of all files at every call.
    reader = dcp.HuggingFaceStorageReader(str(checkpoint / STATE))
    _refuse_gaps(reader.read_metadata(), wanted, checkpoint)
    flat = {PREFIX + name: torch.empty(math.prod(shape), dtype=dtype) for name, shape in wanted.items()}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # as intended
        dcp.load(flat, storage_reader=reader, no_dist=True)
    weights = {name: flat[PREFIX + name].view(shape) for name, shape in wanted.items()}
    for name, tensor in weights.items():
        if not tensor.isfinite().all():
            raise CheckpointError(f"{checkpoint}: {name} holds values that are not finite"
                                  f"{' in fp16, whose largest is 65504; use --dtype bf16' * (dtype == torch.float16)}")
    return weights


def _refuse_gaps(metadata: Any, wanted: Shapes, checkpoint: Path) -> None:
    """A slice that is missing would otherwise be read as whatever lay in memory."""
    saved = {key.removeprefix(PREFIX): value for key, value in metadata.state_dict_metadata.items()
             if key.startswith(PREFIX)}
    refuse_unlike({name: tuple(value.size) for name, value in saved.items()},
                  {name: (math.prod(shape),) for name, shape in wanted.items()}, str(checkpoint))
    for name, value in saved.items():
        end = 0
        for offset, length in sorted((chunk.offsets[0], chunk.sizes[0]) for chunk in value.chunks):
            if offset != end:
                what = "are missing" if offset > end else "are there twice"
                raise CheckpointError(f"{checkpoint}: {name}: elements {min(end, offset):,} to {max(end, offset):,} "
                                      f"{what}; choose another checkpoint")
            end = offset + length


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
