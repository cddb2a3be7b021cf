"""How ranks tell the launcher how they ended, and what that means for the whole run.

Each rank keeps one small file in the folder named by `SHARDWISE_OUTCOME_DIR`; without that variable every call
of a rank does nothing. A rank that is killed leaves its file at "running", which is how it is found out.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from shardwise.errors import EXIT_FAILURE, EXIT_OK, EXIT_STOPPED, EXIT_USER

ENV = "SHARDWISE_OUTCOME_DIR"
Kind = Literal["running", "done", "user", "stopped", "failed"]
PR_SET_PDEATHSIG = 1
_reached: int | None = None

# What the surviving ranks raise when a peer is gone: a consequence, never the first cause.
LOST_PEER = re.compile(
    r"closed by peer|reset by peer|broken pipe|gloo|nccl|DistBackendError|DistNetworkError|DistStoreError|"
    r"socket|heartbeat|timed? ?out|watchdog", re.IGNORECASE)


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
    began_at: float = 0.0
    ended_at: float | None = None


class Verdict(NamedTuple):
    """The whole run's exit code and the sentence to print last ("" after success)."""

    exit_code: int
    message: str


def begin(rank: int, world_size: int) -> None:
    """Say that this rank lives. Its parent's death then stops it as SIGTERM does (Linux)."""
    folder = os.environ.get(ENV)
    if not folder:
        return
    stop_when_parent_dies(signal.SIGTERM)
    _write(Path(folder), RankOutcome(rank=rank, world_size=world_size, pid=os.getpid(),
                                     host=socket.gethostname(), began_at=time.time()))


def reached(step: int) -> None:
    """Remember the step this rank works on, for its last word; costs nothing."""
    global _reached
    _reached = step


def end(rank: int, *, exit_code: int, message: str = "", step: int | None = None,
        kind: Literal["done", "user", "stopped", "failed"] = "done") -> None:
    """Say how this rank ends; the first word counts, so a later failure while leaving hides nothing."""
    folder = os.environ.get(ENV)
    if not folder:
        return
    begun = _read_one(_file(Path(folder), rank))
    if begun is not None and begun.kind != "running":
        return
    was = asdict(begun) if begun is not None else {
        "rank": rank, "world_size": 0, "pid": os.getpid(), "host": socket.gethostname()}
    _write(Path(folder), RankOutcome(**was | {"kind": kind, "exit_code": exit_code, "message": message,
                                              "step": _reached if step is None else step, "ended_at": time.time()}))


def read(folder: Path) -> list[RankOutcome]:
    """Every rank's file, by rank."""
    found = (_read_one(path) for path in sorted(folder.glob("rank-*.json")))
    return [outcome for outcome in found if outcome is not None]


def verdict(folder: Path, world_size: int, launcher_code: int, *, first_rank: int = 0,
            gone: Mapping[int, float] | None = None) -> Verdict:
    """What the run came to.

    `world_size` ranks from `first_rank` on were to write here, `launcher_code` is what the process that started
    them returned, and `gone` holds the time at which a rank without a last word was first missed.
    """
    outcomes = {outcome.rank: outcome for outcome in read(folder)}
    users = [outcome for outcome in outcomes.values() if outcome.kind == "user"]
    if users:
        return Verdict(EXIT_USER, users[0].message)
    missing = [rank for rank in range(first_rank, first_rank + world_size) if rank not in outcomes]
    culprit = first_cause(list(outcomes.values()), gone or {})
    if culprit is not None:
        return Verdict(EXIT_FAILURE, _blame(culprit))
    if missing:
        names = ", ".join(map(str, missing))
        return Verdict(EXIT_FAILURE, f"rank{'s' * (len(missing) > 1)} {names} of {world_size} never came up "
                                     f"(the launcher left with {launcher_code}); see the output above")
    stopped = [outcome for outcome in outcomes.values() if outcome.kind == "stopped"]
    if stopped:
        return Verdict(EXIT_STOPPED, stopped[0].message)
    if launcher_code != 0:
        return Verdict(EXIT_FAILURE, f"every rank finished its work, but the launcher left with {launcher_code}; "
                                     "see the output above")
    return Verdict(EXIT_OK, "")


def first_cause(outcomes: list[RankOutcome], gone: Mapping[int, float]) -> RankOutcome | None:
    """The rank that failed first: those that only lost a peer come last, then by time."""
    def order(outcome: RankOutcome) -> tuple[bool, float]:
        at = outcome.ended_at if outcome.kind == "failed" else gone.get(outcome.rank)
        return lost_peer(outcome), float("inf") if at is None else at

    return min((outcome for outcome in outcomes if outcome.kind in ("failed", "running")), key=order, default=None)


def lost_peer(outcome: RankOutcome) -> bool:
    """True for a failure that another rank's end explains."""
    return outcome.kind == "failed" and bool(LOST_PEER.search(outcome.message))


def stop_when_parent_dies(number: int) -> None:
    """Ask Linux for a signal at the death of the parent process; elsewhere nothing happens."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(number))


def _blame(outcome: RankOutcome) -> str:
    who = f"rank {outcome.rank} ({outcome.host}, pid {outcome.pid})"
    if outcome.kind == "running":
        return (f"{who} failed first: it ended without a word, as after SIGKILL, out of memory, a crash in native "
                "code, or an early exit()")
    step = "" if outcome.step is None else f" at step {outcome.step}"
    return f"{who} failed first{step}: {outcome.message or 'no message'}"


def _file(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank:05d}.json"


def _write(folder: Path, outcome: RankOutcome) -> None:
    """Write beside and rename, so that a reader sees a whole file; a folder that is gone is not an error."""
    with contextlib.suppress(OSError):
        beside = folder / f".rank-{outcome.rank:05d}.{os.getpid()}"
        beside.write_text(json.dumps(asdict(outcome)), encoding="utf-8")
        beside.replace(_file(folder, outcome.rank))


def _read_one(path: Path) -> RankOutcome | None:
    try:
        return RankOutcome(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None
