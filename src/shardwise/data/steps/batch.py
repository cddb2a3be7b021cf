"""Example ids -> the tensors of one micro-batch. B rows, T tokens, K positions whose logits are wanted."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from shardwise.data.steps.feed import Rows
from shardwise.data.steps.windows import FILLER_TOKENS, MicroBatch, computed_width, rounded

IGNORE = -100


@dataclass(frozen=True)
class Batch:
    """One forward pass. The head is computed at `keep` only."""

    input_ids: torch.Tensor
    """int64 [B, T]."""
    position_ids: torch.Tensor
    """int64 [B, T]; restarts at 0 with every example, which is what keeps packed examples apart."""
    attention_mask: torch.Tensor | None
    """int64 [B, T], 1 on tokens, for several padded rows; None for one row without padding."""
    keep: torch.Tensor
    """int64 [K]: positions of T that predict a target in at least one row, then some repeats of position 0."""
    targets: torch.Tensor
    """int64 [B, K], the token after each kept position, or -100."""
    weights: torch.Tensor | None
    """float32 [B, K], the loss weight of each target, 0 where there is none; None when all are 0 or 1."""
    segments: torch.Tensor
    """int64 [B, T]: number of the example a token belongs to, from 0; -1 on padding and filler."""
    tokens: int
    """Tokens of real examples."""
    num_targets: int
    """Entries of `targets` that are not -100."""
    target_weight: float
    """Sum of the targets' weights: `num_targets` when `weights` is None."""

    def to(self, device: torch.device) -> Batch:
        """The same batch on a device."""
        moved = {name: value.to(device, non_blocking=True) for name, value in vars(self).items()
                 if isinstance(value, torch.Tensor)}
        return Batch(**{**vars(self), **moved})

    def model_inputs(self) -> dict[str, object]:
        """Keyword arguments of a transformers causal LM's forward."""
        return {"input_ids": self.input_ids, "position_ids": self.position_ids,
                "attention_mask": self.attention_mask, "logits_to_keep": self.keep, "use_cache": False}


def make_batch(micro: MicroBatch, examples: Rows, *, pad_id: int, max_tokens: int) -> Batch:
    """Tensors (on the CPU) for a micro-batch; an all-ignored filler row when it is empty.

    T and K are rounded up a little so that few shapes occur. What is added lies behind every example, where a
    causal model cannot see it from within one, and is never a target.
    """
    if not micro:
        return filler(pad_id)
    flat = [example for row in micro for example in row]
    loaded = iter(examples.get(flat))
    rows = [[next(loaded) for _ in row] for row in micro]
    height = len(rows)
    width = computed_width(max(sum(len(ids) for ids, _ in row) for row in rows), rows=height, max_tokens=max_tokens)
    input_ids = np.full((height, width), pad_id, np.int64)
    positions = np.zeros((height, width), np.int64)
    segments = np.full((height, width), -1, np.int64)
    targets = np.full((height, width), IGNORE, np.int64)
    weights = np.zeros((height, width), np.float32)
    segment = 0
    for r, row in enumerate(rows):
        at = 0
        for ids, own_weights in row:
            size = len(ids)
            input_ids[r, at:at + size] = ids
            positions[r, at:at + size] = np.arange(size)
            segments[r, at:at + size] = segment
            # Position t predicts t + 1 within the same example; the last one predicts nothing.
            targets[r, at:at + size - 1] = np.where(own_weights[1:] > 0, ids[1:], IGNORE)
            weights[r, at:at + size - 1] = own_weights[1:]
            segment, at = segment + 1, at + size
        positions[r, at:] = np.arange(width - at)
    wanted = np.flatnonzero((targets != IGNORE).any(axis=0))
    keep = np.zeros(rounded(len(wanted)), np.int64)
    keep[:len(wanted)] = wanted
    kept_targets = targets[:, keep]
    kept_targets[:, len(wanted):] = IGNORE
    kept_weights = weights[:, keep]
    kept_weights[:, len(wanted):] = 0
    plain = bool(np.isin(kept_weights, (0, 1)).all())
    live = segments >= 0
    return Batch(
        input_ids=torch.from_numpy(input_ids), position_ids=torch.from_numpy(positions),
        attention_mask=None if height == 1 else torch.from_numpy(live.astype(np.int64)),
        keep=torch.from_numpy(keep), targets=torch.from_numpy(kept_targets),
        weights=None if plain else torch.from_numpy(kept_weights), segments=torch.from_numpy(segments),
        tokens=int(live.sum()), num_targets=int((targets != IGNORE).sum()),
        target_weight=float(kept_weights.sum(dtype=np.float64)))


def filler(pad_id: int) -> Batch:
    """Takes part in every collective of a micro-batch and adds exactly nothing."""
    row = torch.full((1, FILLER_TOKENS), pad_id)
    return Batch(input_ids=row, position_ids=torch.arange(FILLER_TOKENS)[None], attention_mask=None,
                 keep=torch.tensor([0]), targets=torch.tensor([[IGNORE]]), weights=None,
                 segments=torch.full((1, FILLER_TOKENS), -1), tokens=0, num_targets=0, target_weight=0.0)
