"""One optimizer step: sum, normalise once by the global count, communicate once, clip once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from shardwise.data.batch import Batch
from shardwise.dist import sum_over_ranks
from shardwise.errors import TrainingError
from shardwise.model.loss import losses
from shardwise.train.engine import Engine


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What one step did, the same on every rank."""

    loss: float
    """Cross-entropy in nats per supervised token of the global batch."""
    router_loss: float | None
    """Load-balancing loss of a mixture-of-experts model, before its coefficient."""
    grad_norm: float
    """Global L2 norm before clipping."""
    supervised_tokens: int
    tokens: int
    stop: bool
    """True when any rank was asked to stop."""


def optimizer_step(engine: Engine, batches: Sequence[Batch], *, lr: float, supervised_tokens: int, tokens: int,
                   world_size: int, router: tuple[float, int, int] | None, stop: bool) -> StepResult:
    """Run this rank's micro-batches of one step and move the weights.

    `supervised_tokens` and `tokens` are those of the GLOBAL batch. Gradients are averaged over ranks by DDP
    and ZeRO alike, so each rank scales its sums by world_size / global count. Raises TrainingError on every
    rank, before the weights move, when the loss of any rank is not finite.
    """
    # Summed on the device: no host sync until the step's one small all-reduce.
    sums = torch.zeros(4, dtype=torch.float64, device=batches[0].input_ids.device)
    for index, batch in enumerate(batches):
        def loss(batch: Batch = batch) -> torch.Tensor:
            cross_entropy, router_loss = losses(engine.model, batch, router)
            total = cross_entropy * (world_size / supervised_tokens)
            if router is not None and router_loss is not None:
                total = total + router_loss * (router[0] * world_size / tokens)
                sums[1] += router_loss.detach()
            sums[0] += cross_entropy.detach()
            return total

        engine.micro_step(loss, last=index + 1 == len(batches))
    sums[2] = sum(batch.num_targets for batch in batches)
    sums[3] = float(stop)  # the wish to stop travels along, so that all ranks act on it at the same step
    total_loss, total_router, counted, stops = sum_over_ranks(sums).tolist()
    assert counted == supervised_tokens, f"{counted} targets were computed, the step has {supervised_tokens}"
    if not math.isfinite(total_loss) or not math.isfinite(total_router):
        engine.discard()
        raise TrainingError(f"the loss is {total_loss / supervised_tokens}; the weights were not moved")
    grad_norm = engine.apply(lr)
    if not math.isfinite(grad_norm) or grad_norm < 0:  # DeepSpeed says -1 for overflow
        raise TrainingError(f"the gradient norm is {grad_norm}; go on from the last checkpoint")
    return StepResult(loss=total_loss / supervised_tokens, grad_norm=grad_norm, stop=stops > 0,
                      router_loss=None if router is None else total_router / tokens,
                      supervised_tokens=supervised_tokens, tokens=tokens)
