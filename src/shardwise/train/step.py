"""One optimizer step: sum, normalise once by the global sum of weights, communicate once, clip once."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch

from shardwise.data.steps.batch import Batch, filler
from shardwise.dist import sum_over_ranks
from shardwise.errors import OutOfMemory
from shardwise.model.loss import losses
from shardwise.train import heartbeat
from shardwise.train.engine import Engine, LossFn
from shardwise.train.guard import Guard, Refusal
from shardwise.train.memory import is_out_of_memory, release


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What one step did, the same on every rank."""

    loss: float
    """Weighted mean cross-entropy in nats over the supervised tokens of the global batch; NaN without any."""
    router_loss: float | None
    """Load-balancing loss of a mixture-of-experts model, before its coefficient."""
    grad_norm: float
    """Global L2 norm before clipping; NaN where it was not computed."""
    supervised_tokens: int
    tokens: int
    stop: bool
    """True when any rank was asked to stop."""
    loss_scale: float | None
    """fp16's factor in this step."""
    save: bool
    """True when the time for a checkpoint has come on any rank."""
    refused: Refusal | None = None
    """Why the weights were not moved, where they were not."""
    again: Literal["memory", "overflow"] | None = None
    """Set when the same step has to be tried again: memory ran out on some rank, or fp16's loss scale was halved."""


def optimizer_step(engine: Engine, batches: Sequence[Batch], *, lr: float, supervised_tokens: int,
                   target_weight: float, tokens: int, world_size: int, router: tuple[float, int, int] | None,
                   stop: bool, save: bool, guard: Guard, start_again: Callable[[], OutOfMemory]) -> StepResult:
    """Run this rank's micro-batches of one step and move the weights, if the guard has nothing against it.

    `supervised_tokens`, `target_weight` (the sum of their weights) and `tokens` are those of the GLOBAL batch.
    Gradients are averaged over ranks by DDP and ZeRO alike, so each rank scales its sums by world_size / global
    sum. Raises `start_again()` on a rank that ran out of memory inside a collective.
    """
    # Summed on the device: no host sync until the step's one small all-reduce.
    sums = torch.zeros(7, dtype=torch.float64, device=batches[0].input_ids.device)

    def loss_of(batch: Batch) -> LossFn:
        def loss() -> torch.Tensor:
            cross_entropy, router_loss = losses(engine.model, batch, router)
            total = cross_entropy * (world_size / target_weight)
            if router is not None and router_loss is not None:
                total = total + router_loss * (router[0] * world_size / tokens)
                sums[1] += router_loss.detach()
            sums[0] += cross_entropy.detach()
            return total
        return loss

    if target_weight > 0:  # known to all ranks alike; without a target there is nothing to compute
        sums[5] = float(not _all_fit(engine, batches, loss_of, start_again))
    sums[2] = sum(batch.num_targets for batch in batches)
    sums[3] = float(stop)  # the wish to stop travels along, so that all ranks act on it at the same step
    sums[4] = sum(batch.target_weight for batch in batches)
    sums[6] = float(save)
    total_loss, total_router, counted, stops, weighed, short, saves = sum_over_ranks(sums).tolist()
    assert counted == supervised_tokens, f"{counted} targets were computed, the step has {supervised_tokens}"
    assert math.isclose(weighed, target_weight, rel_tol=1e-6), f"weights of {weighed} computed, not {target_weight}"
    loss = total_loss / target_weight if target_weight > 0 else math.nan
    done = StepResult(loss=loss, grad_norm=math.nan, stop=stops > 0, supervised_tokens=supervised_tokens,
                      router_loss=None if router is None else total_router / tokens, tokens=tokens,
                      loss_scale=None if engine.scale is None else engine.scale.value, save=saves > 0)
    if short:
        engine.discard()
        return replace(done, again="memory")
    if target_weight == 0:
        return replace(done, refused=guard.no_target())
    return _judged(engine, guard, done, lr=lr, finite=math.isfinite(total_loss) and math.isfinite(total_router))


def _judged(engine: Engine, guard: Guard, done: StepResult, *, lr: float, finite: bool) -> StepResult:
    """Move the weights unless the guard says no; `finite` is said of the loss, with all its parts."""
    refused: list[Refusal | None] = []

    def allow(norm: float) -> bool:
        refused.append(guard.judge(done.loss if finite else math.nan, norm))
        return refused[0] is None

    norm, scale = engine.apply(lr, allow), engine.scale
    if scale is not None:
        # A loss that is not finite says nothing about the scale: the loss is computed before it is scaled.
        if finite and not math.isfinite(norm) and scale.smaller():
            return replace(done, again="overflow")
        scale.settled(moved=refused == [None])
    return replace(done, grad_norm=norm, refused=refused[0])


def _all_fit(engine: Engine, batches: Sequence[Batch], loss_of: Callable[[Batch], LossFn],
             start_again: Callable[[], OutOfMemory]) -> bool:
    """Run every micro-step; False when memory ran out on this rank.

    Then fillers take the remaining places, so that the other ranks' collectives still find their partner.
    """
    short = False
    for index, batch in enumerate(batches):
        last = index + 1 == len(batches)
        if not short:
            short = not _fits(engine, loss_of(batch), start_again, last=last)
            if not short:
                continue
            release()
        if not _fits(engine, loss_of(filler(0).to(batch.input_ids.device)), start_again, last=last):
            raise start_again()
    return not short


def _fits(engine: Engine, loss: LossFn, start_again: Callable[[], OutOfMemory], *, last: bool) -> bool:
    """One micro-step; False when memory ran out and the step can still be finished with fillers."""
    heartbeat.tick()
    try:
        engine.micro_step(loss, last=last)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        if engine.committed:
            raise start_again() from None
        return False
    return True
