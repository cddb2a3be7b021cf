"""The wish to stop: a signal, the time limit or `run.stop_after`, on any rank."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
import time
from pathlib import Path
from types import FrameType

from shardwise import outcome
from shardwise.checkpoint import layout
from shardwise.errors import EXIT_FAILURE, EXIT_OK, EXIT_STOPPED

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
SAME_WISH_SECONDS = 5.0
"""Slurm and a terminal signal the ranks directly and the launcher passes it on: one wish arrives twice."""
LEAVE_SECONDS = 15.0
"""How long the main thread may take to leave the set-up, where it may be inside a call that does not return."""


class LeaveSetup(BaseException):
    """Raised by a signal in the middle of the set-up; no `except Exception` on the way is meant to catch it."""


class StopRequest:
    """Collects wishes to stop; ranks agree on them in the step's all-reduce, so all stop after the same step.

    Until `training()` there is nothing to agree on and nothing to save: this rank leaves at once.
    """

    def __init__(self, *, started_at: float) -> None:
        self.started_at = started_at
        self.time_limit_seconds: int | None = None
        self.folder: Path | None = None
        """The run folder, once it is known."""
        self.reason: str | None = None
        self.wished_at = 0.0
        self.setting_up = False
        self.leaving = self.poked = False

    def listen(self, rank: int) -> None:
        """Handle SIGTERM, SIGINT and SIGUSR1; a second one, some seconds later, ends the process at once."""
        self.setting_up = True
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        for number in SIGNALS:
            signal.signal(number, self._on_signal)
        # Told of a signal even while the main thread is inside a call that runs no handler.
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        threading.Thread(target=self._watch, args=(reader, rank), name="signals", daemon=True).start()

    def training(self) -> None:
        """The set-up is done: from now on a wish waits for the end of the step."""
        self.setting_up = False

    def left_setup(self, error: BaseException) -> bool:
        """Whether an error ends a set-up that was to end anyway: what a wish interrupts may fail in any way."""
        was, self.setting_up = self.setting_up, False
        return was and (self.reason is not None or isinstance(error, LeaveSetup))

    def wanted(self) -> bool:
        """True once this rank has a reason to stop."""
        limit = self.time_limit_seconds
        if self.reason is None and limit is not None and time.time() - self.started_at >= limit:
            self._wish("run.time_limit")
        return self.reason is not None

    def before_training(self) -> str:
        """What a stop comes to when no step was done."""
        newest = None
        if self.folder is not None:
            with contextlib.suppress(OSError):
                newest = layout.latest(self.folder / "checkpoints")
        kept = "nothing was begun and there is no checkpoint yet" if newest is None else \
            f"nothing was trained since {newest}, which is complete"
        return f"stopped before the first step ({self.reason or 'another rank'}): {kept}. Start again to go on"

    def _wish(self, reason: str) -> None:
        if self.reason is None:
            self.reason, self.wished_at = reason, time.monotonic()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._wish(signal.Signals(number).name)
        if self.setting_up and not self.leaving:
            self.leaving = True
            raise LeaveSetup

    def _watch(self, reader: int, rank: int) -> None:
        while True:
            if select.select([reader], [], [], 1.0)[0]:
                for number in os.read(reader, 64):
                    self._arrived(number, rank)
            if self.setting_up and self.wanted():
                if time.monotonic() - self.wished_at > LEAVE_SECONDS:
                    outcome.end(rank, exit_code=EXIT_STOPPED, kind="stopped", message=self.before_training())
                    os._exit(EXIT_OK if outcome.folder() else EXIT_STOPPED)
                if not self.leaving and not self.poked:  # the time limit, which no handler has seen yet
                    self.poked = True
                    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)

    def _arrived(self, number: int, rank: int) -> None:
        if number not in SIGNALS:
            return
        if self.reason is not None and time.monotonic() - self.wished_at > SAME_WISH_SECONDS:
            name = signal.Signals(number).name
            outcome.end(rank, exit_code=EXIT_FAILURE, kind="failed", message=f"ended at once by a second {name}")
            os._exit(128 + number)
        self._wish(signal.Signals(number).name)
