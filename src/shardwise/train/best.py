"""Which evaluations were the best so far, and whether a better one is still to be expected."""

from __future__ import annotations

import math
from typing import Any


class Best:
    """Takes note of evaluation losses; the same on every rank, which is given rank 0's numbers."""

    def __init__(self, *, keep: int, patience: int | None, min_delta: float) -> None:
        self.keep, self.patience, self.min_delta = keep, patience, min_delta
        self.lowest: list[float] = []
        """Of those after a step, ascending, at most `keep`."""
        self.record = math.inf
        """The last loss that was lower than all before it by `min_delta`."""
        self.since = 0
        """Evaluations since then."""

    @property
    def exhausted(self) -> bool:
        """True when training should end."""
        return self.patience is not None and self.since >= self.patience

    def saw(self, loss: float, *, step: int) -> bool:
        """Take note of an evaluation after `step` steps; True when it is among the `keep` best."""
        if loss < self.record - self.min_delta:
            self.record, self.since = loss, 0
        else:
            self.since += 1
        if step == 0:  # there is nothing to keep of a model that was not trained
            return False
        self.lowest = sorted([*self.lowest, loss])[:self.keep]
        return loss in self.lowest

    def state(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {"lowest": self.lowest, "record": None if math.isinf(self.record) else self.record, "since": self.since}

    def load(self, state: dict[str, Any]) -> None:
        """Go on where a checkpoint was written."""
        self.lowest, self.since = state["lowest"], state["since"]
        self.record = math.inf if state["record"] is None else state["record"]
