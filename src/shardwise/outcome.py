"""How ranks tell the launcher how they ended (launch/verdict.py says what that means for the whole run).

Each rank keeps one small file in the folder named by `SHARDWISE_OUTCOME_DIR`; without that variable every call
of a rank does nothing. A rank that is killed leaves its file at "running", which is how it is found out.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from shardwise.errors import ShardwiseError
from shardwise.liveness import Notes

ENV = "SHARDWISE_OUTCOME_DIR"
LAUNCHER = "SHARDWISE_LAUNCHER_PID"
TORCHRUN = "TORCHELASTIC_ERROR_FILE"
MICRO_BATCH = "micro_batch.json"
"""In the run folder: the limit that the ranks fell back to when memory ran out (train/memory.py)."""
Kind = Literal["running", "done", "user", "stopped", "failed"]
PR_SET_PDEATHSIG = 1
FRAMES = 40
_reached: int | None = None
_phase = ""
_notes: Notes | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class RankOutcome:
    """One rank's file. Times are seconds since the epoch, by the clock of its host."""

    rank: int
    world_size: int
    pid: int
    host: str
    kind: Kind = "running"
    exit_code: int | None = None
    message: str = ""
    step: int | None = None
    """Optimizer steps done; None before the first of this process."""
    phase: str = ""
    """What it was about, so that it reads well after "while"."""
    explained: bool = False
    """Whether the failure is one that the same start would run into again (an error of our own)."""
    stack: Sequence[str] = ()
    """Where it was raised: `FILE:LINE in FUNCTION`, innermost last."""
    began_at: float = 0.0
    ended_at: float | None = None


def folder() -> Path | None:
    """Where ranks write to; None without our launcher."""
    named = os.environ.get(ENV)
    return Path(named) if named else None


def begin(rank: int, world_size: int) -> None:
    """Say that this rank lives. Its parent's death then stops it as SIGTERM does (Linux)."""
    where = folder()
    if where is None:
        return
    stop_when_parent_dies(signal.SIGTERM)
    global _notes
    _write(where, RankOutcome(rank=rank, world_size=world_size, pid=os.getpid(),
                              host=socket.gethostname(), began_at=time.time()))
    with contextlib.suppress(OSError):
        _notes = Notes(where, rank)


def reached(step: int) -> None:
    """Remember how many steps are done, for this rank's last word; costs nothing."""
    global _reached
    _reached = step
    _note()


def steps_done() -> int | None:
    """What `reached` was told last."""
    return _reached


def entered(phase: str) -> None:
    """Remember what this rank is about, for its last word; costs nothing."""
    global _phase
    _phase = phase
    _note()


def _note() -> None:
    if _notes is not None:
        _notes.write(_reached, _phase)


def end(rank: int, *, exit_code: int, message: str = "", step: int | None = None, error: BaseException | None = None,
        kind: Literal["done", "user", "stopped", "failed"] = "done") -> None:
    """Say how this rank ends; the first word counts, so a later failure while leaving hides nothing.

    `error` is what a failure was raised as: without a message it gives that, and the place.
    """
    stack: tuple[str, ...] = ()
    if error is not None:
        message = message or f"{type(error).__name__}: {error}"
        stack = tuple(place(frame.filename, frame.lineno, frame.name)
                      for frame in traceback.extract_tb(error.__traceback__)[-FRAMES:])
    where = folder()
    if where is None:
        if kind == "failed":
            tell_torchrun(message)
        return
    begun = read_one(where, rank)
    if begun is not None and begun.kind != "running":
        return
    was = asdict(begun) if begun is not None else {
        "rank": rank, "world_size": 0, "pid": os.getpid(), "host": socket.gethostname()}
    _write(where, RankOutcome(**was | {
        "kind": kind, "exit_code": exit_code, "message": message, "step": _reached if step is None else step,
        "phase": _phase, "stack": stack, "explained": isinstance(error, ShardwiseError), "ended_at": time.time()}))


def tell_torchrun(message: str) -> None:
    """Put a failure into torchrun's own report, which names the rank that failed first and is printed last."""
    named = os.environ.get(TORCHRUN)
    if named:
        with contextlib.suppress(OSError):
            Path(named).write_text(json.dumps({"message": {
                "message": message, "extraInfo": {"py_callstack": message, "timestamp": str(int(time.time()))}}}))


def read(where: Path) -> list[RankOutcome]:
    """Every rank's file, by rank."""
    found = (_parsed(path) for path in sorted(where.glob("rank-*.json")))
    return [outcome for outcome in found if outcome is not None]


def read_one(where: Path, rank: int) -> RankOutcome | None:
    """One rank's file; None when there is none."""
    return _parsed(_file(where, rank))


def stop_when_parent_dies(number: int) -> None:
    """Ask Linux for a signal at the death of the parent process; elsewhere nothing happens."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(number))


def place(filename: str, line: int | None, function: str) -> str:
    """`FILE:LINE in FUNCTION`, without the folders that packages lie in."""
    for folder_of_packages in ("site-packages", "dist-packages", "src"):
        before, found, after = filename.rpartition(f"{os.sep}{folder_of_packages}{os.sep}")
        if found:
            filename = after
            break
    return f"{filename}:{line or 0} in {function}"


def _file(where: Path, rank: int) -> Path:
    return where / f"rank-{rank:05d}.json"


def _write(where: Path, outcome: RankOutcome) -> None:
    """Write beside and rename, so that a reader sees a whole file; a folder that is gone is not an error."""
    with contextlib.suppress(OSError):
        beside = where / f".rank-{outcome.rank:05d}.{os.getpid()}"
        beside.write_text(json.dumps(asdict(outcome)), encoding="utf-8")
        beside.replace(_file(where, outcome.rank))


def _parsed(path: Path) -> RankOutcome | None:
    try:
        return RankOutcome(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None
