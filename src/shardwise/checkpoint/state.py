"""A strategy's weights and optimizer state as named slices, and back into whatever strategy goes on with them.

Names on disk: `weight/PARAMETER`, and for each kind of optimizer state `exp_avg/PARAMETER` and so on; `step/PARAMETER`
is how often the parameter was moved. All fp32 and flattened.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import torch

from shardwise.checkpoint.pieces import Holder, Piece
from shardwise.checkpoint.slices import Saved, Slice
from shardwise.errors import CheckpointError

WEIGHT, STEP = "weight", "step"


def captured(holder: Holder) -> dict[str, Slice]:
    """This rank's share of everything, as views: valid until the optimizer moves."""
    found = {}
    for piece in holder.saved():
        state = holder.optimizer.state.get(piece.owner, {})
        found[f"{WEIGHT}/{piece.name}"] = Slice(piece.of(piece.owner), piece.size, piece.start)
        for kind, value in state.items():
            if _laid_out_alike(value, piece.owner):
                found[f"{kind}/{piece.name}"] = Slice(piece.of(value), piece.size, piece.start)
        if STEP in state and piece.start == 0:
            found[f"{STEP}/{piece.name}"] = Slice(torch.tensor([float(state[STEP])]), 1, 0)
    return found


def restore(folder: Path, holder: Holder) -> None:
    """Fill weights and optimizer state in place from a folder of slices. Called on every rank.

    Raises CheckpointError when the parameters there are not the ones trained here.
    """
    saved = Saved(folder)
    _check_same(folder, saved.sizes, holder)
    kinds_of: dict[str, set[str]] = defaultdict(set)
    for kind, _, name in (key.partition("/") for key in saved.sizes):
        kinds_of[name].add(kind)
    targets: dict[str, Slice] = {}
    steps: dict[torch.Tensor, list[str]] = defaultdict(list)
    for owner, pieces in _by_owner(holder).items():
        kinds = {kind for piece in pieces for kind in kinds_of[piece.name]} - {WEIGHT}
        state = _prepared(holder.optimizer, owner, kinds)
        for piece in pieces:
            targets[f"{WEIGHT}/{piece.name}"] = Slice(piece.of(owner), piece.size, piece.start)
            for kind in kinds_of[piece.name] - {WEIGHT, STEP}:
                targets[f"{kind}/{piece.name}"] = Slice(piece.of(state[kind]), piece.size, piece.start)
            if STEP in kinds_of[piece.name]:
                steps[owner].append(f"{STEP}/{piece.name}")
    counts = {name: Slice(torch.zeros(1), 1, 0) for names in steps.values() for name in names}
    saved.read(targets | counts)
    for owner, names in steps.items():
        moved = max(counts[name].tensor.item() for name in names)
        holder.optimizer.state[owner][STEP] = _step(holder.optimizer, owner, moved)
    holder.refresh()


def _check_same(folder: Path, saved: dict[str, int], holder: Holder) -> None:
    there = {name.partition("/")[2]: size for name, size in saved.items() if name.startswith(f"{WEIGHT}/")}
    here = {name: int(torch.Size(shape).numel()) for name, shape in holder.shapes().items()}
    if there != here:
        differing = sorted(name for name in there.keys() | here.keys() if there.get(name) != here.get(name))
        first = differing[0]
        raise CheckpointError(f"{folder}: not the weights of this model: {first} has {there.get(first, 'no')} "
                              f"elements there, {here.get(first, 'none')} here ({len(differing)} such)")


def _by_owner(holder: Holder) -> dict[torch.Tensor, list[Piece]]:
    owners: dict[torch.Tensor, list[Piece]] = defaultdict(list)
    for piece in holder.held():
        owners[piece.owner].append(piece)
    return owners


def _prepared(optimizer: torch.optim.Optimizer, owner: torch.Tensor, kinds: set[str]) -> dict[str, torch.Tensor]:
    """The optimizer's state of a tensor, all zero, with a tensor for each kind: what has no saved state begins anew."""
    state: dict[str, torch.Tensor] = optimizer.state[owner]
    for kind in kinds - {STEP} - state.keys():
        state[kind] = torch.zeros_like(owner, memory_format=torch.preserve_format).detach()
    for kind, value in state.items():
        if kind == STEP:
            state[kind] = _step(optimizer, owner, 0)
        elif _laid_out_alike(value, owner):
            value.zero_()
    return state


def _laid_out_alike(value: object, owner: torch.Tensor) -> bool:
    return isinstance(value, torch.Tensor) and value.shape == owner.shape


def _step(optimizer: torch.optim.Optimizer, owner: torch.Tensor, count: float) -> Any:
    """Torch's optimizers count in a tensor, on the device where they are fused; DeepSpeed's CPU Adam in an int."""
    if "fused" not in optimizer.defaults:
        return int(count)
    device = owner.device if optimizer.defaults["fused"] else torch.device("cpu")
    return torch.tensor(float(count), dtype=torch.float32, device=device)
