"""The learning rate as a pure function of the optimizer step."""

from __future__ import annotations

import math

from shardwise.config.resolve import StepPlan
from shardwise.config.schema import ScheduleConfig


def lr_at(step: int, *, peak: float, plan: StepPlan, schedule: ScheduleConfig) -> float:
    """Learning rate used in optimizer step `step` (from 0 to plan.num_steps - 1).

    The warm-up rises linearly, so that step w - 1 of w has not quite reached the peak and step w has it; the
    decay starts at the peak and would reach `min_lr_ratio * peak` at step num_steps.
    """
    warmup, last = plan.warmup_steps, plan.num_steps
    if step < warmup:
        return peak * (step + 1) / (warmup + 1)
    floor = schedule.min_lr_ratio
    return peak * (floor + (1.0 - floor) * _shape(step - warmup, last - warmup, warmup, schedule))


def _shape(done: int, horizon: int, warmup: int, schedule: ScheduleConfig) -> float:
    """From 1 to 0 (to 1 / sqrt for inverse_sqrt) over `horizon` steps after the warm-up."""
    if schedule.kind == "constant":
        return 1.0
    if schedule.kind == "inverse_sqrt":
        return math.sqrt(max(1, warmup) / (max(1, warmup) + done))
    if schedule.kind == "wsd":
        decay = math.ceil((warmup + horizon) * schedule.decay_ratio - 1e-9)
        return min(1.0, (horizon - done) / decay) if decay else 1.0
    share = done / max(1, horizon)
    return 1.0 - share if schedule.kind == "linear" else 0.5 * (1.0 + math.cos(math.pi * share))
