"""What a live model gives to its result: the whole state, and the logits that prove a copy equal."""

from __future__ import annotations

from typing import Any

import torch


def gathered_state(engine: Any, *, zero_stage: int) -> dict[str, torch.Tensor] | None:
    """The whole state dict on rank 0, None elsewhere. Every rank must call it: zero3 gathers."""
    if zero_stage == 3:
        state: dict[str, torch.Tensor] | None = engine._zero3_consolidated_16bit_state_dict()
        return state or None
    import torch.distributed as dist

    if dist.is_initialized() and dist.get_rank() != 0:
        return None
    return {name: tensor.detach().cpu() for name, tensor in engine.module.state_dict().items()}


def check_logits(model: torch.nn.Module, ids: list[int], device: torch.device) -> list[float]:
    """Logits (fp32, the whole vocabulary) after the given ids, in the dtype the weights are held in."""
    training = model.training
    model.eval()
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([ids], device=device), use_cache=False).logits[0, -1]
    model.train(training)
    values: list[float] = logits.float().cpu().tolist()
    return values
