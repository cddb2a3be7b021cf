"""The wish to stop: a signal, the time limit or `run.stop_after`, on any rank."""

from __future__ import annotations

import signal
import time
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class StopRequest:
    """Collects wishes to stop; ranks agree on them in the step's all-reduce, so all stop after the same step."""

    def __init__(self, *, started_at: float, time_limit_seconds: int | None) -> None:
        self.started_at, self.time_limit_seconds = started_at, time_limit_seconds
        self.reason: str | None = None

    def listen(self) -> None:
        """Handle SIGTERM, SIGINT and SIGUSR1; a second one has its usual effect at once."""
        for number in SIGNALS:
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.reason = signal.Signals(number).name
        signal.signal(number, signal.SIG_DFL)

    def wanted(self) -> bool:
        """True once this rank has a reason to stop."""
        limit = self.time_limit_seconds
        if self.reason is None and limit is not None and time.time() - self.started_at >= limit:
            self.reason = "run.time_limit"
        return self.reason is not None
