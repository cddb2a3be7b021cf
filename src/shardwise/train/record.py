"""The training lines of metrics.jsonl."""

from __future__ import annotations

import sys
from typing import Any

import torch

from shardwise.train.parts import Parts, StepData
from shardwise.train.step import StepResult


def step_line(parts: Parts, step: int, lr: float, data: StepData, result: StepResult, seconds: float
              ) -> dict[str, Any]:
    """One training line of metrics.jsonl; `tokens_per_second` counts real tokens over all ranks.

    A step that moved no weights has `skipped` and its kind in place of `loss` and `grad_norm`.
    """
    numbers: dict[str, Any] = {"loss": result.loss, "grad_norm": result.grad_norm} if result.refused is None \
        else {"skipped": result.refused.kind}
    line = {"step": step, **numbers, "lr": lr,
            "supervised_tokens": result.supervised_tokens, "tokens": result.tokens,
            "tokens_per_second": round(result.tokens / seconds, 1), "step_seconds": round(seconds, 4),
            "epoch": round(parts.feed.epochs(step), 6), "examples": data.examples,
            "micro_batches": len(data.batches), "padded_tokens": data.padded_tokens,
            "packing_efficiency": round(data.packing_efficiency, 4),
            "memory_gib": round(peak_memory_bytes() / 2**30, 3)}
    if result.loss_scale is not None:
        line["loss_scale"] = result.loss_scale
    if parts.limit.tokens != parts.limit.asked:
        line["max_tokens_per_micro_batch"] = parts.limit.tokens
    if result.router_loss is not None and result.refused is None:
        line["router_loss"] = result.router_loss
    return line


def peak_memory_bytes() -> int:
    """Peak memory of this rank: of the GPU where there is one, else of the process."""
    if torch.cuda.is_available():
        return int(torch.cuda.max_memory_allocated())
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1024 if sys.platform == "linux" else 1)
