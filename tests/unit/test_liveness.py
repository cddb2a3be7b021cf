"""Who is said to have stalled, from beats alone: no clock, no process."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from shardwise import liveness
from shardwise.liveness import Beat, Notes, Vigil

AT_WORK = Beat(rank=0, pid=100, number=0, phase="training", timed=True, step=7, idle_seconds=0.0, waiting=False,
               stopping=False, stack=("a.py:1 in f",))


class Machine:
    """Two ranks whose beats arrive once a second."""

    def __init__(self, limit: float) -> None:
        self.vigil, self.now, self.number = Vigil(limit), 0.0, 0

    def second(self, *beats: Beat, late: float = 1.0):
        """Another second; every beat is a new one unless its number is negative."""
        self.now, self.number = self.now + late, self.number + 1
        return self.vigil.look([beat if beat.number < 0 else replace(beat, number=self.number) for beat in beats],
                               self.now)

    def seconds(self, count: int, *beats: Beat):
        """The first stall within so many seconds, and after how many."""
        for second in range(1, count + 1):
            stall = self.second(*(replace(beat, idle_seconds=beat.idle_seconds and beat.idle_seconds + second)
                                  for beat in beats))
            if stall is not None:
                return second, stall
        return None


def of(rank: int, **more: object) -> Beat:
    return replace(AT_WORK, rank=rank, pid=100 + rank, **more)


def test_the_one_that_waits_is_not_to_blame() -> None:
    """Both go without progress; the one that is in no collective is the cause, though it is not the first by rank."""
    waits, hangs = of(0, waiting=True, idle_seconds=1.0), of(1, idle_seconds=0.5)
    second, stall = Machine(60).seconds(100, waits, hangs)
    assert stall.beat.rank == 1 and 59 <= second <= 61 and not stall.silent


def test_the_one_behind_is_to_blame_where_both_wait() -> None:
    """In different collectives: a mistake in the program. After the grace, the one that has done less."""
    second, stall = Machine(60).seconds(100, of(0, waiting=True, idle_seconds=1.0),
                                        of(1, waiting=True, idle_seconds=1.0, step=6))
    assert stall.beat.rank == 1 and 74 <= second <= 76


def test_waiting_for_one_that_works_is_no_stall() -> None:
    assert Machine(60).seconds(300, of(0, waiting=True, idle_seconds=1.0), of(1)) is None


def test_a_phase_without_ticks_takes_as_long_as_it_takes() -> None:
    assert Machine(60).seconds(300, of(0, timed=False, idle_seconds=1.0)) is None


def test_one_that_beats_no_more_stalls_in_any_phase() -> None:
    machine, frozen = Machine(60), of(1, timed=False, phase="tokenising", number=-5)
    second, stall = machine.seconds(100, of(0, timed=False), frozen)
    assert stall.beat.rank == 1 and stall.silent and second == 62


def test_a_restarted_rank_beats_anew_from_the_same_number() -> None:
    machine = Machine(60)
    machine.seconds(50, of(0, number=-5))
    assert machine.seconds(50, replace(of(0, number=-5), pid=999)) is None


def test_time_in_which_the_launcher_was_suspended_does_not_count() -> None:
    machine, still = Machine(60), of(0, number=-5)
    machine.second(still)
    assert machine.second(still, late=3600.0) is None
    assert machine.seconds(50, still) is None


@pytest.mark.parametrize(("silent", "stopped", "words"), [
    (False, False, "rank 0 ({host}, pid 100) stalled at step 7, while training: no progress for 61 s"),
    (True, False, "rank 0 ({host}, pid 100) stalled at step 7, while training: no sign of life for 61 s"),
    (True, True, "rank 0 ({host}, pid 100) stalled at step 7, while training: no sign of life for 61 s, for the "
                 "process is stopped (SIGSTOP)")])
def test_message(silent: bool, stopped: bool, words: str) -> None:
    message = liveness.Stall(AT_WORK, 61.2, silent, stopped).message(60.0)
    assert message.splitlines()[1] == "  a.py:1 in f"
    assert message.splitlines()[-1] == (words.format(host=os.uname().nodename) +
                                        " (launch.stall_minutes=1); every rank was ended")


def test_a_note_is_newer_than_the_beat(tmp_path: Path) -> None:
    notes = Notes(tmp_path, 0)
    liveness.write(tmp_path, replace(AT_WORK, pid=os.getpid()))
    notes.write(9, "saving a checkpoint")
    [beat] = liveness.read(tmp_path).values()
    assert (beat.step, beat.phase, *beat.stack) == (
        9, "saving a checkpoint", "a.py:1 in f",
        "(this was while training at step 7; where it went from there was not seen)")
    notes.write(7, "training")
    assert liveness.read(tmp_path)[0].stack == ["a.py:1 in f"]


def test_a_note_of_another_process_counts_for_nothing(tmp_path: Path) -> None:
    Notes(tmp_path, 0).write(9, "saving a checkpoint")
    liveness.write(tmp_path, AT_WORK)
    assert liveness.read(tmp_path)[0].step == 7


def test_a_half_written_beat_is_none(tmp_path: Path) -> None:
    (tmp_path / "beat-00000.json").write_text(json.dumps({"rank": 0})[:-1])
    assert liveness.read(tmp_path) == {}
    liveness.write(tmp_path / "gone", AT_WORK)  # no error


def test_alive() -> None:
    assert liveness.alive(os.getpid())
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    assert not liveness.alive(child)  # a zombie
    os.waitpid(child, 0)
    assert not liveness.alive(child)
