"""How the launcher learns what the ranks came to, and whom it blames (B75)."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from shardwise import outcome
from shardwise.errors import TrainingError
from shardwise.launch.verdict import first_cause, verdict
from shardwise.liveness import Beat
from shardwise.outcome import RankOutcome


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(outcome.ENV, str(tmp_path))
    monkeypatch.setattr(outcome, "stop_when_parent_dies", lambda number: None)
    return tmp_path


def put(folder: Path, rank: int, **more: object) -> None:
    """A rank's file as it would be written, without the rank."""
    fields = {"rank": rank, "world_size": 2, "pid": 100 + rank, "host": "h", "began_at": 1.0} | more
    (folder / f"rank-{rank:05d}.json").write_text(json.dumps(fields))


def test_without_the_variable_nothing_happens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(outcome.ENV, raising=False)
    outcome.begin(0, 1)
    outcome.end(0, exit_code=0)
    assert list(tmp_path.iterdir()) == []


def test_begin_then_end(folder: Path) -> None:
    outcome.begin(1, 2)
    [begun] = outcome.read(folder)
    assert (begun.rank, begun.world_size, begun.kind, begun.ended_at) == (1, 2, "running", None)
    outcome.end(1, exit_code=1, kind="failed", message="RuntimeError: boom", step=2)
    [ended] = outcome.read(folder)
    assert (ended.kind, ended.exit_code, ended.step, ended.pid) == ("failed", 1, 2, begun.pid)
    assert ended.ended_at is not None and begun.began_at <= ended.ended_at <= time.time()


def test_first_word_counts(folder: Path) -> None:
    outcome.begin(0, 1)
    outcome.end(0, exit_code=2, kind="user", message="recipe.yaml:3: no")
    outcome.end(0, exit_code=1, kind="failed", message="while leaving")
    assert verdict(folder, 1, 0)[:2] == (2, "recipe.yaml:3: no")


def test_a_folder_that_is_gone_is_no_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(outcome.ENV, str(folder / "gone"))
    outcome.begin(0, 1)
    outcome.end(0, exit_code=0)


def test_a_half_written_file_is_no_outcome(folder: Path) -> None:
    (folder / "rank-00000.json").write_text('{"rank": 0,')
    assert outcome.read(folder) == []


@pytest.mark.parametrize(("kinds", "launcher", "code"), [
    (("done", "done"), 0, 0),
    (("done", "done"), 1, 1),       # something broke after the work was done
    (("stopped", "stopped"), 0, 3),
    (("user", "done"), 0, 2),
    (("done", "user"), 1, 2),
    (("user", "failed"), 1, 2),
    (("stopped", "failed"), 1, 1),
    (("done", "running"), 0, 1),    # exit(0) early: the launcher sees no failure
    (("stopped", "running"), 0, 1),
    (("done", None), 0, 1),         # B68: one process instead of two
    ((None, None), 0, 1),
    ((None, None), 1, 1),
])
def test_exit_code_of_the_whole(folder: Path, kinds: tuple[str | None, ...], launcher: int, code: int) -> None:
    for rank, kind in enumerate(kinds):
        if kind is not None:
            put(folder, rank, kind=kind, message=f"from {rank}", ended_at=None if kind == "running" else 5.0)
    found = verdict(folder, 2, launcher)
    assert found.exit_code == code
    assert (found.message == "") == (code == 0)


def test_b68_missing_rank_is_named(folder: Path) -> None:
    put(folder, 0, kind="done", ended_at=2.0)
    assert "rank 1 of 2 never came up" in verdict(folder, 2, 0).message


def test_b75_first_failure_in_time_is_named_with_its_step(folder: Path) -> None:
    put(folder, 0, kind="failed", message="ValueError: later", ended_at=9.0)
    put(folder, 1, kind="failed", message="RuntimeError: boom", step=2, ended_at=8.0)
    assert verdict(folder, 2, 1)[:2] == (1, "rank 1 (h, pid 101) failed first at step 2: RuntimeError: boom")


LOST = "RuntimeError: [../gloo/transport/tcp/pair.cc:538] Connection closed by peer [127.0.0.1]:4711"


@pytest.mark.parametrize("message", [
    LOST, "DistBackendError: NCCL error in ProcessGroupNCCL.cpp:1234", "RuntimeError: Broken pipe",
    "RuntimeError: Timed out waiting 1800000ms for recv operation to complete", "DistNetworkError: recv failed"])
def test_b75_a_lost_peer_never_comes_first(folder: Path, message: str) -> None:
    put(folder, 0, kind="failed", message=message, ended_at=2.0)
    put(folder, 1, kind="failed", message="KeyError: 'x'", ended_at=2.5)
    assert verdict(folder, 2, 1).message.startswith("rank 1 ")


def test_b75_killed_rank_beats_its_peers_connection_error(folder: Path) -> None:
    put(folder, 0, kind="failed", message=LOST, ended_at=2.0)
    put(folder, 1, kind="running")
    message = verdict(folder, 2, 1, gone={1: 2.1}).message
    assert message.startswith("rank 1 (h, pid 101) failed first") and "SIGKILL" in message


def test_b75_rank_killed_by_the_agent_is_not_the_first_cause(folder: Path) -> None:
    put(folder, 0, kind="running")  # in a collective when the agent ended it
    put(folder, 1, kind="failed", message="RuntimeError: boom", ended_at=2.0)
    assert verdict(folder, 2, 1, gone={0: 32.0}).message.startswith("rank 1 ")
    assert verdict(folder, 2, 1).message.startswith("rank 1 ")


def test_b75_of_two_missed_ranks_the_first_missed_is_named(folder: Path) -> None:
    put(folder, 0, kind="running")
    put(folder, 1, kind="running")
    assert verdict(folder, 2, 1, gone={0: 7.0, 1: 6.0}).message.startswith("rank 1 ")


def test_ranks_of_a_later_node(folder: Path) -> None:
    for rank in (2, 3):
        put(folder, rank, kind="done", ended_at=1.0)
    assert verdict(folder, 2, 0, first_rank=2)[:2] == (0, "")


def test_only_lost_peers_still_name_one() -> None:
    ranks = [RankOutcome(rank=r, world_size=2, pid=r, host="h", kind="failed", message=LOST, ended_at=5.0 - r)
             for r in (0, 1)]
    cause = first_cause(ranks, {})
    assert cause is not None and cause.rank == 1


def test_where_and_when_it_was_raised_is_told(folder: Path) -> None:
    outcome.begin(0, 1)
    try:
        json.loads("{")
    except ValueError as error:
        outcome.entered("evaluating")
        outcome.end(0, exit_code=1, kind="failed", error=error, step=3)
    found = verdict(folder, 1, 1)
    first, *stack, last = found.message.splitlines()
    assert first == "rank 0 raised in (innermost last):" and "in raw_decode" in stack[-1]
    assert " failed first at step 3, while evaluating: JSONDecodeError: Expecting" in last
    assert found.mendable


def test_an_error_of_our_own_would_come_again(folder: Path) -> None:
    outcome.begin(0, 1)
    outcome.end(0, exit_code=1, kind="failed", error=TrainingError("the loss is nan"))
    assert not verdict(folder, 1, 1).mendable


def beat(rank: int, **more: object) -> Beat:
    fields = {"pid": 100 + rank, "number": 3, "phase": "saving a checkpoint", "timed": True, "step": 4,
              "idle_seconds": 0.0, "waiting": False, "stopping": False, "stack": ["x.py:1 in f"]} | more
    return Beat(rank=rank, **fields)  # type: ignore[arg-type]


def test_a_killed_rank_was_last_seen_somewhere(folder: Path) -> None:
    put(folder, 0, kind="done", ended_at=2.0)
    put(folder, 1)
    message = verdict(folder, 2, 1, gone={1: 3.0}, beats={1: beat(1)}).message
    assert message.startswith("rank 1 last seen in (innermost last):\n  x.py:1 in f\nrank 1 (h, pid 101) failed first "
                              "at step 4, while saving a checkpoint: it ended without a word")
    other = verdict(folder, 2, 1, gone={1: 3.0}, beats={1: beat(1, pid=999)}).message  # of an earlier start
    assert other.startswith("rank 1 (h, pid 101) failed first: it ended")


def test_a_rank_that_had_to_be_ended_did_not_die(folder: Path) -> None:
    put(folder, 0, kind="failed", message=LOST, ended_at=2.0)
    put(folder, 1)
    assert "a call that does not return" in verdict(folder, 2, 1, ended={1}).message


@pytest.mark.parametrize(("one", "code"), [
    ({"kind": "failed", "message": LOST, "ended_at": 6.0}, 3),     # it lost the one that stopped
    ({"kind": "failed", "message": LOST, "ended_at": 4.0}, 1),     # the other way round: its agent signalled the rest
    ({"kind": "failed", "message": "KeyError: 1", "ended_at": 6.0}, 1),
    ({"kind": "failed", "message": LOST, "ended_at": 6.0, "step": 1}, 1),  # it had trained
    ({"kind": "running"}, 1)])                                     # it died
def test_a_stop_before_the_first_step_takes_the_others_along(folder: Path, one: dict[str, object], code: int) -> None:
    put(folder, 0, kind="stopped", message="stopped before the first step", ended_at=5.0)
    put(folder, 1, **one)
    assert verdict(folder, 2, 1).exit_code == code
    if one == {"kind": "running"}:
        assert verdict(folder, 2, 1, ended={1}).exit_code == 3  # it did not leave in time


def test_torchruns_report_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(outcome.ENV, raising=False)
    monkeypatch.setenv(outcome.TORCHRUN, str(tmp_path / "error.json"))
    outcome.end(0, exit_code=0)
    assert not (tmp_path / "error.json").exists()
    outcome.end(0, exit_code=1, kind="failed", message="boom")
    assert json.loads((tmp_path / "error.json").read_text())["message"]["message"] == "boom"
