"""Whether a step may move the weights: decided from its loss and gradient norm, which are the same on every rank.

No communication of its own: the loss is a sum over all ranks and the norm is global, so every rank comes to the same
answer.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from shardwise.config.schema import GuardConfig

MIN_HISTORY = 20
"""Steps to have seen before anything is called a spike (fewer where the window is shorter)."""
SMALLEST_SPREAD = 0.01
"""Of the median: in a series that hardly moves, rounding must not become a spike."""
MAD_TO_SIGMA = 1.4826
"""Standard deviations in a median absolute deviation, for normal data."""


@dataclass(frozen=True)
class Refusal:
    """Why a step did not move the weights, and what follows."""

    kind: Literal["non_finite", "spike", "no_target"]
    action: Literal["skip", "stop", "rollback"]
    z: float | None = None
    """Of a spike: the larger score of loss and gradient norm."""


class Guard:
    """Judges each step by those that went before it."""

    def __init__(self, config: GuardConfig) -> None:
        self.config = config
        self.losses: deque[float] = deque(maxlen=config.spike_window_steps)
        self.grad_norms: deque[float] = deque(maxlen=config.spike_window_steps)
        self.in_a_row = 0
        """Steps refused since the last one that was taken."""

    def judge(self, loss: float, grad_norm: float) -> Refusal | None:
        """None if the step may be taken. Changes nothing, so a step that is tried again can be judged again."""
        if not math.isfinite(loss) or not math.isfinite(grad_norm):
            return self._refusal("non_finite", self.config.non_finite)
        if self.config.spike == "off" or len(self.losses) < min(MIN_HISTORY, self.config.spike_window_steps):
            return None
        z = max(robust_z(loss, self.losses), robust_z(grad_norm, self.grad_norms))
        return self._refusal("spike", self.config.spike, z) if z > self.config.spike_z else None

    def no_target(self) -> Refusal:
        """For a step without a supervised token: there is nothing to learn and nothing to blame."""
        return self._refusal("no_target", "skip")

    def _refusal(self, kind: Literal["non_finite", "spike", "no_target"],
                 action: Literal["skip", "stop", "rollback"], z: float | None = None) -> Refusal:
        return Refusal(kind, "stop" if self.in_a_row >= self.config.max_skips else action, z)

    def note(self, loss: float, grad_norm: float, refused: Refusal | None) -> None:
        """Remember a step, once; what was refused is no measure for later ones."""
        if refused is not None:
            self.in_a_row += 1
            return
        self.in_a_row = 0
        self.losses.append(loss)
        self.grad_norms.append(grad_norm)

    def state(self) -> dict[str, Any]:
        """For a checkpoint: a resumed run must judge as this one would have."""
        return {"losses": list(self.losses), "grad_norms": list(self.grad_norms), "in_a_row": self.in_a_row}

    def load(self, state: dict[str, Any]) -> None:
        """From a checkpoint."""
        for kept, saved in ((self.losses, state["losses"]), (self.grad_norms, state["grad_norms"])):
            kept.clear()
            kept.extend(saved)
        self.in_a_row = state["in_a_row"]


def robust_z(value: float, history: Sequence[float]) -> float:
    """How many standard deviations a value lies above the median of its predecessors, by their median deviation.

    One outlier moves a mean and a standard deviation, but not these two.
    """
    median = statistics.median(history)
    deviation = MAD_TO_SIGMA * statistics.median(abs(seen - median) for seen in history)
    return (value - median) / max(deviation, SMALLEST_SPREAD * abs(median), math.ulp(1.0))
