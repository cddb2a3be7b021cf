"""Signs of life: what each rank says of itself every second, and when that means it has stalled.

A rank's thread writes a `Beat` into the launcher's folder (outcome.py); the launcher reads them with `read` and
judges them with a `Vigil`. Times are each process's own, so clocks need not agree, and time in which a process was
suspended does not count.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import socket
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import NamedTuple

BEAT_SECONDS = 1.0
COUNTED_SECONDS = 5.0
"""Most that one look at the clock adds: a longer gap means that the one who looks was suspended."""
WAITING_GRACE_SECONDS = 15.0
"""A rank that waits for others is given this much longer: the one it waits for is to be named, not it."""
AGREED = ("training", "evaluating", "saving a checkpoint")
"""Phases in which the wish of one rank to stop reaches the others by itself, within a step or a second."""
TIMED = (*AGREED, "answering samples")
"""Phases that tick. Set-up and the export take as long as the data and the model are large."""
PROC = Path("/proc")
NOTE_BYTES = 256


@dataclass(frozen=True, kw_only=True, slots=True)
class Beat:
    """What a rank said last."""

    rank: int
    pid: int
    number: int
    """Counts the beats; a reader sees by it that the rank's thread lives."""
    phase: str
    """What the main thread is about, so that it reads well after "while"."""
    timed: bool
    """Whether this phase has to make progress all the time; set-up may take as long as it takes."""
    step: int | None
    """Optimizer steps done; None before the first of this process."""
    idle_seconds: float
    """Since the main thread last made progress."""
    waiting: bool
    """Whether it is inside a collective, or a backward pass that may communicate."""
    stopping: bool
    """Whether this rank has been asked to stop."""
    stack: Sequence[str]
    """`FILE:LINE in FUNCTION` of the main thread, innermost last."""


class Stall(NamedTuple):
    """The rank that holds the others up, and for how long it has."""

    beat: Beat
    seconds: float
    silent: bool
    """Its thread is still, too."""
    stopped: bool = False
    """The whole process is, by SIGSTOP."""

    def message(self, limit_seconds: float) -> str:
        """Where it is, then one sentence: who, when, for how long."""
        beat, seconds = self.beat, f"{self.seconds:.0f} s"
        where = "".join(f"  {line}\n" for line in beat.stack)
        still = f"no progress for {seconds}"
        if self.silent:
            still = f"no sign of life for {seconds}{', for the process is stopped (SIGSTOP)' * self.stopped}"
        return (f"rank {beat.rank} {'last seen' if self.silent else 'hangs'} in (innermost last):\n{where}"
                f"rank {beat.rank} ({socket.gethostname()}, pid {beat.pid}) stalled"
                f"{'' if beat.step is None else f' at step {beat.step}'}, while {beat.phase}"
                f"{', waiting for other ranks' * (beat.waiting and not self.silent)}: {still}"
                f" (launch.stall_minutes={limit_seconds / 60:g}); every rank was ended")


def write(folder: Path, beat: Beat) -> None:
    """Write beside and rename, so that a reader sees a whole file; a folder that is gone is not an error."""
    with contextlib.suppress(OSError):
        beside = folder / f".beat-{beat.rank:05d}"
        beside.write_text(json.dumps(asdict(beat)), encoding="utf-8")
        beside.replace(folder / f"beat-{beat.rank:05d}.json")


def read(folder: Path) -> dict[int, Beat]:
    """Every rank's last beat, with the step and the phase it has come to since."""
    beats = {}
    for path in sorted(folder.glob("beat-*.json")):
        with contextlib.suppress(OSError, ValueError, TypeError):
            beat = Beat(**json.loads(path.read_text(encoding="utf-8")))
            beats[beat.rank] = beat
            pid, step, phase = json.loads(_note(folder, beat.rank).read_text(encoding="utf-8"))
            if pid == beat.pid and (step, phase) != (beat.step, beat.phase):
                when = f"while {beat.phase}{'' if beat.step is None else f' at step {beat.step}'}"
                stack = (*beat.stack, f"(this was {when}; where it went from there was not seen)")
                beats[beat.rank] = replace(beat, step=step, phase=phase, stack=stack)
    return beats


class Notes:
    """Step and phase of a rank in a file that is mapped into memory: up to date however suddenly the rank ends."""

    def __init__(self, folder: Path, rank: int) -> None:
        path = _note(folder, rank)
        path.write_bytes(b" " * NOTE_BYTES)
        with open(path, "r+b") as file:
            self.mapped = mmap.mmap(file.fileno(), NOTE_BYTES)

    def write(self, step: int | None, phase: str) -> None:
        """Costs a microsecond or two; no call to the system."""
        self.mapped[:] = json.dumps([os.getpid(), step, phase]).encode()[:NOTE_BYTES].ljust(NOTE_BYTES)


def _note(folder: Path, rank: int) -> Path:
    return folder / f"note-{rank:05d}"


class Vigil:
    """Watches over the ranks of one machine."""

    def __init__(self, limit_seconds: float) -> None:
        self.limit = limit_seconds
        self.looked_at: float | None = None
        self.silent: dict[int, float] = {}
        """Rank -> seconds since its last new beat."""
        self.numbers: dict[int, tuple[int, int]] = {}

    def look(self, beats: Sequence[Beat], now: float) -> Stall | None:
        """The rank that stalled first, or None; `now` in seconds of a clock that only goes forward."""
        passed = 0.0 if self.looked_at is None else min(now - self.looked_at, COUNTED_SECONDS)
        self.looked_at = now
        for beat in beats:
            known = self.numbers.get(beat.rank) == (beat.pid, beat.number)
            self.numbers[beat.rank] = beat.pid, beat.number
            self.silent[beat.rank] = self.silent.get(beat.rank, 0.0) + passed if known else 0.0
        stalls = [stall for beat in beats if (stall := self._stalled(beat)) is not None]
        if not stalls or self._one_is_busy(beats, stalls):
            return None
        return min(stalls, key=lambda stall: (not stall.silent, stall.beat.waiting, _done(stall.beat), -stall.seconds))

    def _stalled(self, beat: Beat) -> Stall | None:
        if self.silent[beat.rank] > self.limit:
            return Stall(beat, self.silent[beat.rank], True, stopped=process_state(beat.pid)[0] in ("T", "t"))
        if beat.timed and beat.idle_seconds > self.limit + WAITING_GRACE_SECONDS * beat.waiting:
            return Stall(beat, beat.idle_seconds, False)
        return None

    def _one_is_busy(self, beats: Sequence[Beat], stalls: Sequence[Stall]) -> bool:
        """Whether all who stall wait in a collective for one that is still at work."""
        if not all(stall.beat.waiting and not stall.silent for stall in stalls):
            return False
        held_up = {stall.beat.rank for stall in stalls}
        return any(not beat.waiting for beat in beats if beat.rank not in held_up)


def _done(beat: Beat) -> int:
    return -1 if beat.step is None else beat.step


def process_state(pid: int) -> tuple[str, int]:
    """State letter and parent of a process (Linux); ("", 0) when there is none."""
    try:
        # The name may hold spaces and brackets; what follows the last bracket does not.
        text = (PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
        fields = text.rpartition(")")[2].split()
        return fields[0], int(fields[1])
    except (OSError, IndexError, ValueError):
        return "", 0


def alive(pid: int) -> bool:
    """Whether a process still runs; one that ended but was not waited for does not."""
    if sys.platform == "linux":
        return process_state(pid)[0] not in ("", "Z", "X")
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
