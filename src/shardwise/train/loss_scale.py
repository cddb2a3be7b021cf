"""fp16's factor on the loss, the same for ddp and ZeRO so that a checkpoint of one goes on under the other.

fp16 holds nothing above 65,504 and loses small gradients to zero, so the loss is multiplied before the backward pass
and the gradients are divided by the same factor after it (arXiv:1710.03740).
"""

from __future__ import annotations

from typing import Any

FIRST, SMALLEST = 2.0 ** 16, 1.0
GROW_AFTER = 2000
"""Steps without an overflow, after which twice the factor is tried."""


class LossScale:
    """The current factor. Every rank changes it at the same step, because it follows the global gradient norm."""

    def __init__(self) -> None:
        self.value = FIRST
        self.good_steps = 0
        self._at_first_try = FIRST

    def smaller(self) -> bool:
        """After an overflow: halve, True if the step is worth another try.

        At the smallest factor it is not: then the factor was not to blame and is what it was before the step.
        """
        if self.value <= SMALLEST:
            self.value = self._at_first_try
            return False
        self.value = max(SMALLEST, self.value / 2)
        self.good_steps = 0
        return True

    def settled(self, *, moved: bool) -> None:
        """After the last try of a step; `moved` when it moved the weights."""
        if moved:
            self.good_steps += 1
            if self.good_steps == GROW_AFTER:
                self.value, self.good_steps = self.value * 2, 0
        self._at_first_try = self.value

    def state(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {"value": self.value, "good_steps": self.good_steps}

    def load(self, state: dict[str, Any]) -> None:
        """From a checkpoint."""
        self.value, self.good_steps = float(state["value"]), int(state["good_steps"])
        self._at_first_try = self.value
