"""When the launcher starts again by itself, and which signals it takes for a second one."""

from __future__ import annotations

import json
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from shardwise.launch import run as launching
from shardwise.launch.run import Care
from shardwise.launch.verdict import Verdict
from shardwise.launch.watch import Watch

DIED = Verdict(1, "rank 1 failed first: it ended without a word", True)
REFUSED = Verdict(1, "rank 0 failed first: the loss is nan", False)
MEMORY = Verdict(1, "rank 1 failed first: out of memory in step 3 with 512 tokens", False)
DONE = Verdict(0, "")


def starts(monkeypatch: pytest.MonkeyPatch, folder: Path, ends: Sequence[tuple[Verdict, int | None]], *,
           restarts: int = 0, signalled: bool = False) -> tuple[Verdict, int]:
    """What comes of starts that end like this, each leaving this size in micro_batch.json; and how many there were."""
    left = list(ends)

    def once(*given: Any) -> tuple[Verdict, bool]:
        verdict, size = left.pop(0)
        if size is not None:
            (folder / "micro_batch.json").write_text(json.dumps({"asked": 512, "max_tokens_per_micro_batch": size}))
        return verdict, signalled

    monkeypatch.setattr(launching, "_once", once)
    care = Care(folder=folder, job="x", stall_seconds=1.0, restarts=restarts)
    result = launching.run(None, None, {}, care)  # type: ignore[arg-type]
    return result, len(ends) - len(left)


@pytest.mark.parametrize(("restarts", "count", "last"), [(0, 1, DIED), (1, 2, DIED), (2, 3, DONE)])
def test_as_often_as_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, restarts: int, count: int,
                           last: Verdict) -> None:
    ends = [(DIED, None), (DIED, None), (DONE, None)]
    assert starts(monkeypatch, tmp_path, ends, restarts=restarts) == (last, count)


@pytest.mark.parametrize("end", [REFUSED, Verdict(2, "a mistake"), Verdict(3, "stopped"), DONE])
def test_never_where_it_would_come_to_the_same(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, end: Verdict) -> None:
    assert starts(monkeypatch, tmp_path, [(end, None), (DONE, None)], restarts=9) == (end, 1)


def test_never_against_a_signal(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert starts(monkeypatch, tmp_path, [(DIED, None), (DONE, None)], restarts=9, signalled=True) == (DIED, 1)


def test_smaller_micro_batches_do_not_count(monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
                                            capsys: pytest.CaptureFixture[str]) -> None:
    ends = [(MEMORY, 256), (MEMORY, 128), (DIED, 128), (DONE, None)]
    assert starts(monkeypatch, tmp_path, ends, restarts=1) == (DONE, 4)
    assert "with micro-batches of at most 128 tokens" in capsys.readouterr().err


def test_memory_that_did_not_help_is_final(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "micro_batch.json").write_text(json.dumps({"max_tokens_per_micro_batch": 256}))
    assert starts(monkeypatch, tmp_path, [(MEMORY, 256), (DONE, None)]) == (MEMORY, 1)
    assert starts(monkeypatch, tmp_path, [(MEMORY, 255), (MEMORY, None), (DONE, None)]) == (MEMORY, 2)


@pytest.mark.parametrize(("signals", "killed"), [
    ([(signal.SIGTERM, 1.0)], False),
    ([(signal.SIGTERM, 1.0), (signal.SIGTERM, 1.01)], False),  # once from the batch system, once passed on by a script
    ([(signal.SIGTERM, 1.0), (signal.SIGINT, 1.6)], True),
    ([(signal.SIGUSR1, 1.0), (signal.SIGTERM, 9.0)], False)])  # a warning, then the end of the time
def test_a_second_signal(tmp_path: Path, signals: list[tuple[int, float]], killed: bool) -> None:
    watch = Watch(tmp_path, None, stall_seconds=1.0)  # type: ignore[arg-type]
    watch.signals = signals
    assert watch._second_signal() is killed
