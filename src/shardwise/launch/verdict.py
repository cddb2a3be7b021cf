"""What the ranks' last words come to for the whole run: an exit code, whom to blame, whether to start again."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from shardwise import outcome
from shardwise.errors import EXIT_FAILURE, EXIT_OK, EXIT_STOPPED, EXIT_USER
from shardwise.liveness import Beat
from shardwise.outcome import RankOutcome

# What the surviving ranks raise when a peer is gone: a consequence, never the first cause.
LOST_PEER = re.compile(
    r"closed by peer|reset by peer|broken pipe|gloo|nccl|DistBackendError|DistNetworkError|DistStoreError|"
    r"socket|heartbeat|timed? ?out|watchdog", re.IGNORECASE)


class Verdict(NamedTuple):
    """The whole run's exit code and the sentence to print last ("" after success)."""

    exit_code: int
    message: str
    mendable: bool = False
    """Whether another start may end otherwise: a rank died, or raised what is no error of our own."""


def verdict(folder: Path, world_size: int, launcher_code: int, *, first_rank: int = 0,
            gone: Mapping[int, float] | None = None, beats: Mapping[int, Beat] | None = None,
            ended: Collection[int] = ()) -> Verdict:
    """What the run came to.

    `world_size` ranks from `first_rank` on were to write to `folder`, `launcher_code` is what the process that
    started them returned, `gone` holds the time at which a rank without a last word was first missed, `beats` what
    each was last about, and `ended` the ranks that were alive when the launcher ended them all.
    """
    outcomes = {outcome.rank: outcome for outcome in outcome.read(folder)}
    users = [outcome for outcome in outcomes.values() if outcome.kind == "user"]
    if users:
        return Verdict(EXIT_USER, users[0].message)
    early = stopped_in_setup(list(outcomes.values()), ended)
    if early is not None:
        return Verdict(EXIT_STOPPED, early.message)
    missing = [rank for rank in range(first_rank, first_rank + world_size) if rank not in outcomes]
    culprit = first_cause(list(outcomes.values()), gone or {})
    if culprit is not None:
        beat = (beats or {}).get(culprit.rank)
        mine = beat if beat is not None and beat.pid == culprit.pid else None
        return Verdict(EXIT_FAILURE, _blame(culprit, mine, culprit.rank in ended), not culprit.explained)
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


def stopped_in_setup(outcomes: Sequence[RankOutcome], ended: Collection[int]) -> RankOutcome | None:
    """A rank that stopped before its first step, where the others did so too or only lost it: nothing is lost."""
    stopped = [outcome for outcome in outcomes if outcome.kind == "stopped"]
    if not stopped or any(outcome.step is not None for outcome in outcomes):
        return None
    first = min(outcome.ended_at or 0.0 for outcome in stopped)

    def explained(outcome: RankOutcome) -> bool:
        # One that failed before may be why the stopped one was signalled.
        lost_it = lost_peer(outcome) and (outcome.ended_at or 0.0) >= first
        return outcome.kind == "stopped" or lost_it or (outcome.kind == "running" and outcome.rank in ended)

    # The first to leave knows why; the others may have been told by the launcher.
    return min(stopped, key=lambda outcome: outcome.ended_at or 0.0) if all(map(explained, outcomes)) else None


def first_cause(outcomes: Sequence[RankOutcome], gone: Mapping[int, float]) -> RankOutcome | None:
    """The rank that failed first: those that only lost a peer come last, then by time."""
    def order(outcome: RankOutcome) -> tuple[bool, float]:
        at = outcome.ended_at if outcome.kind == "failed" else gone.get(outcome.rank)
        return lost_peer(outcome), float("inf") if at is None else at

    return min((outcome for outcome in outcomes if outcome.kind in ("failed", "running")), key=order, default=None)


def lost_peer(outcome: RankOutcome) -> bool:
    """True for a failure that another rank's end explains."""
    return outcome.kind == "failed" and not outcome.explained and bool(LOST_PEER.search(outcome.message))


def _blame(culprit: RankOutcome, beat: Beat | None, ended: bool) -> str:
    """Where the rank was, then one sentence: who, when, what."""
    alive = culprit.kind == "running"
    step, phase = culprit.step, culprit.phase
    stack: Sequence[str] = culprit.stack
    if alive and beat is not None:
        step, phase, stack = beat.step, beat.phase, beat.stack
    who = (f"rank {culprit.rank} ({culprit.host}, pid {culprit.pid}) failed first"
           f"{'' if step is None else f' at step {step}'}{f', while {phase}' if phase else ''}")
    what = culprit.message or "no message"
    if alive:
        what = ("it was still there, in a call that does not return, when the others had given it up") if ended else (
            "it ended without a word, as after SIGKILL, out of memory, a crash in native code, or an early exit()")
    return f"{placed(culprit.rank, stack, 'last seen in' if alive else 'raised in')}{who}: {what}"


def placed(rank: int, stack: Sequence[str], how: str) -> str:
    """The stack as lines of their own, before the sentence that ends a message."""
    if not stack:
        return ""
    return f"rank {rank} {how} (innermost last):\n" + "".join(f"  {line}\n" for line in stack)
