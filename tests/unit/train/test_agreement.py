"""Asking about a stop in the middle of an evaluation: rarely when batches are quick, always when they are slow."""

from __future__ import annotations

import time

import pytest
import torch

from shardwise.train import agreement
from shardwise.train.agreement import StopAsked
from shardwise.train.signals import StopRequest


@pytest.mark.parametrize(("seconds", "asked"), [(0.001, [1, 3, 7, 15, 31, 63]), (5.0, [1, 2, 3, 4, 5, 6])])
def test_how_often(monkeypatch: pytest.MonkeyPatch, seconds: float, asked: list[int]) -> None:
    clock: list[float] = [0.0]
    rounds: list[int] = []
    monkeypatch.setattr(agreement.time, "perf_counter", lambda: clock[-1])
    monkeypatch.setattr(agreement, "sum_over_ranks", lambda told: rounds.append(len(clock) - 1) or told)
    stop_asked = StopAsked(StopRequest(started_at=time.time()), torch.device("cpu"))
    for _ in range(63):
        clock.append(clock[-1] + seconds)
        assert not stop_asked()
    assert rounds[:6] == asked


def test_the_wish_of_any_rank_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    stop_asked = StopAsked(StopRequest(started_at=time.time()), torch.device("cpu"))
    assert not stop_asked.now()
    monkeypatch.setattr(agreement, "sum_over_ranks", lambda told: told + torch.tensor([1.0, 0.5, 1.0]))
    assert stop_asked.now()
    stop_asked.stop.reason = "SIGTERM"
    monkeypatch.setattr(agreement, "sum_over_ranks", lambda told: told)
    assert stop_asked.now()
