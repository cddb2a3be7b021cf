"""The harness itself: ranks answer, fail with their own words, and never outlive a time-out."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from dist import harness
from dist.harness import spawn

WORLD = 3
"""Of its own, so that the ranks of the other tests stay up."""


@pytest.fixture(autouse=True)
def quick_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "START_SECONDS", 1.0)


def alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists() if os.path.isdir("/proc") else False


def asked(folder: Path) -> list[dict[str, int]]:
    return spawn("dist.misbehaving:answer", world_size=WORLD, args={"x": 5}, folder=folder, timeout_s=30)


def test_ranks_answer_and_stay_up(tmp_path: Path) -> None:
    first, again = asked(tmp_path / "a"), asked(tmp_path / "b")
    assert [(got["rank"], got["of"], got["x"]) for got in first] == [(0, 3, 5), (1, 3, 5), (2, 3, 5)]
    assert first == again  # the same processes


def test_a_failing_rank_is_heard_and_the_others_are_ended(tmp_path: Path) -> None:
    before = asked(tmp_path / "a")
    began = time.monotonic()
    with pytest.raises(AssertionError, match=r"rank 1: .*exit code 1(?s:.*)RuntimeError: this rank was told to fail"):
        spawn("dist.misbehaving:fail_on_one", world_size=WORLD, args={"rank": 1}, folder=tmp_path, timeout_s=30)
    assert time.monotonic() - began < 10
    assert not any(alive(got["pid"]) for got in before)
    assert {got["pid"] for got in asked(tmp_path / "b")}.isdisjoint(got["pid"] for got in before)


def test_a_hanging_rank_is_ended_and_says_where_it_hung(tmp_path: Path) -> None:
    before = asked(tmp_path / "a")
    with pytest.raises(AssertionError, match=r"is not done after 2 s(?s:.*)in hang"):
        spawn("dist.misbehaving:hang", world_size=WORLD, args={}, folder=tmp_path, timeout_s=2)
    assert not any(alive(got["pid"]) for got in before)
