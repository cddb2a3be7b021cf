"""Questions put to the model itself before its answers are relied on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

FIRST, SECOND = 7, 9
"""Tokens of the two examples packed together."""


def packing_leak(model: torch.nn.Module, *, vocabulary: int, device: torch.device,
                 autocast: Callable[[], Any]) -> float:
    """How far one packed example's logits move when the one before it changes; 0 for a model that isolates.

    Relative to the largest logit. Packed rows carry position ids that restart and no attention mask. Runs two
    small forward passes on every rank (collectives under zero3).
    """
    generator = torch.Generator().manual_seed(0)
    draw = torch.randint(0, vocabulary, (2, FIRST + SECOND), generator=generator)
    draw[1, FIRST:] = draw[0, FIRST:]
    positions = torch.cat([torch.arange(FIRST), torch.arange(SECOND)])[None].to(device)
    training = model.training
    model.eval()
    try:
        with torch.no_grad(), autocast():
            logits = [model(input_ids=row[None].to(device), position_ids=positions, attention_mask=None,
                            use_cache=False).logits[0, FIRST:].float() for row in draw]
    finally:
        model.train(training)
    return float((logits[0] - logits[1]).abs().max() / logits[0].abs().max().clamp_min(1e-6))


def isolates(leak: float, *, low_precision: bool) -> bool:
    """True when a leak is rounding (kernels may sum in another order) rather than attention."""
    return leak <= (1e-2 if low_precision else 1e-5)
