"""One optimizer step: sum, normalise once by the global sum of weights, communicate once, clip once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from shardwise.data.steps.batch import Batch
from shardwise.dist import sum_over_ranks
from shardwise.errors import TrainingError
from shardwise.model.loss import losses
from shardwise.train import heartbeat
from shardwise.train.engine import Engine


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What one step did, the same on every rank."""

    loss: float
    """Weighted mean cross-entropy in nats over the supervised tokens of the global batch."""
    router_loss: float | None
    """Load-balancing loss of a mixture-of-experts model, before its coefficient."""
    grad_norm: float
    """Global L2 norm before clipping."""
    supervised_tokens: int
    tokens: int
    stop: bool
    """True when any rank was asked to stop."""


def optimizer_step(engine: Engine, batches: Sequence[Batch], *, lr: float, supervised_tokens: int,
                   target_weight: float, tokens: int, world_size: int, router: tuple[float, int, int] | None,
                   stop: bool) -> StepResult:
    """Run this rank's micro-batches of one step and move the weights.

    `supervised_tokens`, `target_weight` (the sum of their weights) and `tokens` are those of the GLOBAL batch.
    Gradients are averaged over ranks by DDP and ZeRO alike, so each rank scales its sums by world_size / global
    sum. Raises TrainingError on every rank, before the weights move, when the loss of any rank is not finite.
    """
    # Summed on the device: no host sync until the step's one small all-reduce.
    sums = torch.zeros(5, dtype=torch.float64, device=batches[0].input_ids.device)
    for index, batch in enumerate(batches):
        def loss(batch: Batch = batch) -> torch.Tensor:
            cross_entropy, router_loss = losses(engine.model, batch, router)
            total = cross_entropy * (world_size / target_weight)
            if router is not None and router_loss is not None:
                total = total + router_loss * (router[0] * world_size / tokens)
                sums[1] += router_loss.detach()
            sums[0] += cross_entropy.detach()
            return total

        heartbeat.tick()
        engine.micro_step(loss, last=index + 1 == len(batches))
    sums[2] = sum(batch.num_targets for batch in batches)
    sums[3] = float(stop)  # the wish to stop travels along, so that all ranks act on it at the same step
    sums[4] = sum(batch.target_weight for batch in batches)
    total_loss, total_router, counted, stops, weighed = sum_over_ranks(sums).tolist()
    assert counted == supervised_tokens, f"{counted} targets were computed, the step has {supervised_tokens}"
    assert math.isclose(weighed, target_weight, rel_tol=1e-6), f"weights of {weighed} computed, not {target_weight}"
    if not math.isfinite(total_loss) or not math.isfinite(total_router):
        engine.discard()
        raise TrainingError(f"the loss is {total_loss / target_weight}; the weights were not moved")
    grad_norm = engine.apply(lr)
    if not math.isfinite(grad_norm) or grad_norm < 0:  # DeepSpeed says -1 for overflow
        raise TrainingError(f"the gradient norm is {grad_norm}; go on from the last checkpoint")
    return StepResult(loss=total_loss / target_weight, grad_norm=grad_norm, stop=stops > 0,
                      router_loss=None if router is None else total_router / tokens,
                      supervised_tokens=supervised_tokens, tokens=tokens)
