"""How the launcher learns what the ranks came to, and whom it blames (B75)."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from shardwise import outcome
from shardwise.launch.verdict import first_cause, verdict
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
