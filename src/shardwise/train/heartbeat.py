"""Signs of life of this rank, from a thread of its own; and its end when nobody else would bring it.

The loop says what it is about (`phase`) and that it got on (`tick`). Our launcher reads the beats and ends a job that
stalls; without it (torchrun, accelerate) a rank whose main thread stalls ends itself, and the agent the others.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from types import FrameType

from shardwise import liveness, lock, outcome
from shardwise.errors import EXIT_FAILURE
from shardwise.liveness import BEAT_SECONDS, COUNTED_SECONDS, WAITING_GRACE_SECONDS, Beat
from shardwise.train.signals import StopRequest

ORPHAN_SECONDS = 7.0
"""What a rank has to save and leave once its launcher is gone."""
FRAMES = 40
WAITING = (f"torch{os.sep}distributed{os.sep}", f"torch{os.sep}autograd{os.sep}graph.py")


class _Now:
    """What the main thread is about; written there, read by the thread."""

    phase = "starting"
    ticks = 0
    limit_seconds: float | None = None


def phase(name: str) -> None:
    """The main thread begins something else, named so that it reads well after "while"."""
    _Now.phase = name
    _Now.ticks += 1
    outcome.entered(name)


def tick() -> None:
    """The main thread got on with what it is about; costs nothing."""
    _Now.ticks += 1


def limit(minutes: float) -> None:
    """How long a phase that ticks may go without a tick (`launch.stall_minutes`)."""
    _Now.limit_seconds = minutes * 60


def start(rank: int, stop: StopRequest) -> None:
    """Beat until the process ends."""
    main = threading.main_thread().ident or 0
    threading.Thread(target=Heart(rank, stop, main).beat_on, name="heartbeat", daemon=True).start()


class Heart:
    """The thread's work; `main` is the ident of the thread it watches."""

    def __init__(self, rank: int, stop: StopRequest, main: int) -> None:
        self.rank, self.stop, self.main = rank, stop, main
        self.number, self.ticks, self.idle, self.looked_at = 0, -1, 0.0, time.monotonic()
        self.orphaned_at: float | None = None

    def beat_on(self) -> None:
        """One beat after another."""
        while True:
            beat = self.beat()
            folder = outcome.folder()
            lock.touch()
            if folder is None:
                self._end_if_stalled(beat)
            else:
                liveness.write(folder, beat)
                self._end_if_orphaned()
            time.sleep(BEAT_SECONDS)

    def beat(self) -> Beat:
        """Look at the main thread."""
        now, ticks, name = time.monotonic(), _Now.ticks, _Now.phase
        passed = min(now - self.looked_at, COUNTED_SECONDS)  # a longer gap: this process was suspended
        self.idle = self.idle + passed if ticks == self.ticks else 0.0
        self.looked_at, self.ticks, self.number = now, ticks, self.number + 1
        frame = sys._current_frames().get(self.main)
        return Beat(rank=self.rank, pid=os.getpid(), number=self.number, phase=name, timed=name in liveness.TIMED,
                    step=outcome.steps_done(), idle_seconds=self.idle, waiting=waits(frame),
                    stopping=self.stop.reason is not None, stack=stack_of(frame))

    def _end_if_stalled(self, beat: Beat) -> None:
        limit = _Now.limit_seconds
        if limit is None or not beat.timed or beat.idle_seconds <= limit + WAITING_GRACE_SECONDS * beat.waiting:
            return
        message = liveness.Stall(beat, beat.idle_seconds, False).message(limit)
        print(f"\n{message}", file=sys.stderr, flush=True)
        outcome.tell_torchrun(message)
        os._exit(EXIT_FAILURE)

    def _end_if_orphaned(self) -> None:
        launcher = os.environ.get(outcome.LAUNCHER)
        if launcher is None or liveness.alive(int(launcher)):
            return
        if self.orphaned_at is None:
            self.orphaned_at = time.monotonic()
            os.kill(os.getpid(), signal.SIGTERM)
        elif time.monotonic() - self.orphaned_at > ORPHAN_SECONDS:
            # The group, for a rank may have started a compiler, or a tracker's process.
            os.killpg(os.getpgrp(), signal.SIGKILL)


def stack_of(frame: FrameType | None) -> tuple[str, ...]:
    """`FILE:LINE in FUNCTION`, innermost last."""
    lines: list[str] = []
    while frame is not None and len(lines) < FRAMES:
        lines.append(outcome.place(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
        frame = frame.f_back
    return tuple(reversed(lines))


def waits(frame: FrameType | None) -> bool:
    """Whether a thread is inside a collective, or in a backward pass, where DDP and ZeRO communicate."""
    for _ in range(12):
        if frame is None:
            return False
        if any(part in frame.f_code.co_filename for part in WAITING):
            return True
        frame = frame.f_back
    return False
