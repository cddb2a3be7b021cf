"""The wish to stop: a signal, the time limit or `run.stop_after`, on any rank."""

from __future__ import annotations

import os
import signal
import time
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
SAME_WISH_SECONDS = 5.0
"""Slurm and a terminal signal the ranks directly and the launcher passes it on: one wish arrives twice."""


class StopRequest:
    """Collects wishes to stop; ranks agree on them in the step's all-reduce, so all stop after the same step."""

    def __init__(self, *, started_at: float) -> None:
        self.started_at = started_at
        self.time_limit_seconds: int | None = None
        self.reason: str | None = None
        self.signalled_at = 0.0

    def listen(self) -> None:
        """Handle SIGTERM, SIGINT and SIGUSR1; a second one, some seconds later, ends the process at once."""
        for number in SIGNALS:
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.reason is None:
            self.reason, self.signalled_at = signal.Signals(number).name, now
        elif now - self.signalled_at > SAME_WISH_SECONDS:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def wanted(self) -> bool:
        """True once this rank has a reason to stop."""
        limit = self.time_limit_seconds
        if self.reason is None and limit is not None and time.time() - self.started_at >= limit:
            self.reason = "run.time_limit"
        return self.reason is not None
