"""The random generators of a rank, as plain tensors and values."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch

from shardwise.errors import CheckpointError


def file_name(rank: int) -> str:
    """`rng-00000.pt`."""
    return f"rng-{rank:05d}.pt"


def write(path: Path, state: dict[str, Any]) -> None:
    """Write what `capture` gave."""
    torch.save(state, path)


def restore(path: Path) -> None:
    """Set this process's generators to what was written. Raises CheckpointError for a file that holds anything else."""
    try:
        state = torch.load(path, weights_only=True)
    except Exception as error:  # torch, pickle and zipfile each raise their own
        raise CheckpointError(f"{path}: not the state of random generators: {str(error).splitlines()[0]}") from None
    torch.set_rng_state(state["torch"])
    if torch.cuda.is_available() and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])
    kind, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))


def capture() -> dict[str, Any]:
    """Of this process: torch, its GPUs, numpy and Python."""
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    version, internal, gauss = random.getstate()
    return {"torch": torch.get_rng_state(),
            "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
            "numpy": [kind, torch.from_numpy(np.asarray(keys).astype(np.int64)), position, has_gauss, cached],
            "python": [version, list(internal), gauss]}


def reseed(seed: int, step: int, rank: int) -> None:
    """Begin dropout's randomness anew, for a rank without a state of its own; no two ranks or steps alike."""
    sequence = np.random.SeedSequence([seed, step, rank]).generate_state(2)
    torch.manual_seed(int(sequence[0]) << 31 ^ int(sequence[1]))
