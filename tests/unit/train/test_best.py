"""Best evaluations and early stopping, on numbers alone."""

from __future__ import annotations

import json

import pytest

from shardwise.train.best import Best


def told(best: Best, losses: list[float], *, start: int = 1) -> list[bool]:
    return [best.saw(loss, step=step) for step, loss in enumerate(losses, start)]


def test_the_lowest_are_worth_keeping() -> None:
    best = Best(keep=2, patience=None, min_delta=0.0)
    assert told(best, [5.0, 4.0, 4.5, 4.2, 6.0, 4.2]) == [True, True, True, True, False, True]
    assert best.lowest == [4.0, 4.2] and not best.exhausted


def test_nothing_is_kept_of_an_untrained_model_but_it_is_to_be_beaten() -> None:
    best = Best(keep=3, patience=1, min_delta=0.0)
    assert told(best, [2.0, 3.0], start=0) == [False, True]
    assert best.exhausted


@pytest.mark.parametrize(("min_delta", "ends_after"), [(0.0, 7), (0.05, 5), (0.5, 4)])
def test_patience(min_delta: float, ends_after: int) -> None:
    best = Best(keep=0, patience=3, min_delta=min_delta)
    for number, loss in enumerate([3.0, 2.9, 2.89, 2.88, 3.0, 2.88, 2.95, 1.0], 1):
        assert not best.saw(loss, step=number)
        if best.exhausted:
            break
    assert number == ends_after


def test_it_goes_on_from_a_checkpoint() -> None:
    first, straight = (Best(keep=2, patience=3, min_delta=0.1) for _ in range(2))
    told(first, [3.0, 2.0, 2.5])
    second = Best(keep=2, patience=3, min_delta=0.1)
    second.load(json.loads(json.dumps(first.state())))
    assert told(straight, [3.0, 2.0, 2.5]) + told(straight, [1.95, 1.99]) == \
        [True, True, True] + told(second, [1.95, 1.99])
    assert second.state() == straight.state() and second.exhausted
    fresh = Best(keep=1, patience=None, min_delta=0.0)
    fresh.load(json.loads(json.dumps(fresh.state())))
    assert fresh.state() == {"lowest": [], "record": None, "since": 0}
