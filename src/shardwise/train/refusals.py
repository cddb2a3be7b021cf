"""What follows a step that did not move the weights: a line in guard.jsonl, then on, back, or the end."""

from __future__ import annotations

import json
import logging
import math
from typing import Any

from shardwise.checkpoint import store
from shardwise.errors import TrainingError
from shardwise.train.guard import Refusal
from shardwise.train.parts import Parts, StepData
from shardwise.train.step import StepResult

log = logging.getLogger("shardwise")
FILE = "guard.jsonl"
NAMED = 8
"""Rows named in a message; guard.jsonl has them all."""


def answer(parts: Parts, step: int, data: StepData, result: StepResult) -> None:
    """Write a refused step down and do what the guard decided. Runs on every rank.

    Raises TrainingError on every rank where that is to stop.
    """
    refused = result.refused
    assert refused is not None
    places = [data.rows.place(i) for i in data.ids]
    if parts.ranks.main:
        line = {"step": step, "kind": refused.kind, "loss": _finite(result.loss),
                "grad_norm": _finite(result.grad_norm), "z": refused.z, "action": refused.action,
                "examples": data.ids, "places": places}
        with open(parts.folder / FILE, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
    what = described(step, refused, result)
    if refused.action == "stop":
        raise TrainingError(f"{what}; the weights were not moved, and the last checkpoint is intact. Rows of the step: "
                            f"{_named(places)}. {_way_out(parts, refused)}")
    went_on = "left out" if refused.action == "skip" else f"left out, and back to {go_back(parts)}"
    if parts.ranks.main:
        log.warning("%s: %s (rows in %s)", what, went_on, parts.folder / FILE)


def described(step: int, refused: Refusal, result: StepResult) -> str:
    """What was wrong with a step, in numbers."""
    if refused.kind == "no_target":
        return f"step {step} has no supervised token"
    numbers = f"step {step}: the loss is {result.loss:.6g}, the gradient norm {result.grad_norm:.6g}"
    return numbers + ("" if refused.z is None else f", {refused.z:.1f} deviations above the steps before")


def go_back(parts: Parts) -> str:
    """Bring the newest sound checkpoint's weights and optimizer state back; returns its name."""
    parts.saver.settle()
    folder = store.find(parts.folder / "checkpoints", parts.ranks)
    assert folder is not None, "with guard.*=rollback a run begins with a checkpoint"
    parts.saver.load(folder, seed=parts.resolved.config.run.seed)
    return folder.name


def wants_rollback(parts: Parts) -> bool:
    """True when a step may ask for a checkpoint to go back to."""
    guard = parts.resolved.config.guard
    return "rollback" in (guard.non_finite, guard.spike)


def _way_out(parts: Parts, refused: Refusal) -> str:
    guard = parts.guard
    if guard.in_a_row > guard.config.max_skips:
        return (f"It is number {guard.in_a_row} of the steps refused in a row (guard.max_skips="
                f"{guard.config.max_skips}): look at these rows, or go on from an earlier checkpoint with a lower "
                "optim.lr")
    return (f"Look at these rows, lower optim.lr, or set guard.{refused.kind}=skip (go on without the step) or "
            "rollback (go on from the last checkpoint's weights)")


def _named(places: list[str]) -> str:
    more = len(places) - NAMED
    return ", ".join(places[:NAMED]) + (f" and {more:,} more (all in {FILE})" if more > 0 else "")


def _finite(value: float) -> Any:
    """JSON has no NaN and no infinity."""
    return value if math.isfinite(value) else None
