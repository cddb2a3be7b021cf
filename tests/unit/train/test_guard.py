"""When a step is refused, from its numbers alone."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from shardwise.config.schema import GuardConfig
from shardwise.train.guard import MIN_HISTORY, Guard, Refusal, robust_z
from shardwise.train.loss_scale import FIRST, GROW_AFTER, LossScale

BAD = (math.nan, math.inf, -math.inf)


def guard(*, history: int = 0, **settings: Any) -> Guard:
    """A guard that has seen so many steps: losses 1.0, 1.1, ..., 1.9, over and over, and norms ten times that."""
    made = Guard(GuardConfig(**settings))
    for n in range(history):
        made.note(1 + n % 10 / 10, 10 + n % 10, None)
    return made


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("action", ["stop", "skip", "rollback"])
def test_what_is_not_finite_is_refused(bad: float, action: Any) -> None:
    made = guard(non_finite=action)
    assert made.judge(bad, 1.0) == made.judge(1.0, bad) == Refusal("non_finite", action)
    assert made.judge(1.0, 1.0) is None


def test_the_score_by_hand() -> None:
    # median 3, deviations 2 1 0 1 97: median 1, so one standard deviation is taken to be 1.4826
    assert robust_z(10.413, [1.0, 2.0, 3.0, 4.0, 100.0]) == pytest.approx(5.0)
    assert robust_z(3.0, [1.0, 2.0, 3.0, 4.0, 100.0]) == 0
    assert robust_z(-1000.0, [1.0, 2.0, 3.0, 4.0, 100.0]) < 0


def test_a_series_that_hardly_moves_has_a_least_spread() -> None:
    assert robust_z(2.02, [2.0] * 30) == pytest.approx(1.0)  # 1 % of the median
    assert math.isfinite(robust_z(1.0, [0.0] * 30))


def test_a_spike_is_upward_and_in_either_number() -> None:
    made = guard(history=100, spike="rollback", spike_z=6.0)
    # median 1.45, deviation 0.25 x 1.4826
    limit = 1.45 + 6 * 0.25 * 1.4826
    assert made.judge(limit - 1e-6, 14.5) is None and made.judge(-100.0, -100.0) is None
    refused = made.judge(limit + 1e-6, 14.5)
    assert refused is not None and (refused.kind, refused.action) == ("spike", "rollback")
    assert refused.z == pytest.approx(6.0, abs=1e-4)
    assert made.judge(1.45, 10 * limit + 1e-6) is not None
    assert guard(history=100).judge(1e9, 1e9) is None  # off unless asked for


def test_a_spike_needs_a_history() -> None:
    assert guard(history=MIN_HISTORY - 1, spike="skip").judge(1e9, 1e9) is None
    assert guard(history=MIN_HISTORY, spike="skip").judge(1e9, 1e9) is not None
    assert guard(history=3, spike="skip", spike_window_steps=4).judge(1e9, 1e9) is None
    assert guard(history=4, spike="skip", spike_window_steps=4).judge(1e9, 1e9) is not None


def test_only_the_window_counts_and_refused_steps_do_not() -> None:
    made = guard(spike="skip", spike_window_steps=4)
    for loss in (100.0, 100.0, 100.0, 100.0, 1.0, 1.0, 1.0, 1.0):
        made.note(loss, 1.0, None)
    assert list(made.losses) == [1.0] * 4
    refused = made.judge(100.0, 1.0)
    assert refused is not None
    made.note(100.0, 1.0, refused)
    assert list(made.losses) == [1.0] * 4


def test_judging_changes_nothing() -> None:
    made = guard(history=30, spike="skip")
    before = made.state()
    made.judge(math.nan, 1.0), made.judge(1e9, 1.0), made.judge(1.0, 1.0), made.no_target()
    assert made.state() == before


def test_the_step_after_max_skips_stops() -> None:
    made = guard(non_finite="skip", max_skips=2)
    actions = []
    for loss in (math.nan, 1.0, math.nan, math.nan, math.nan):
        refused = made.judge(loss, 1.0)
        made.note(loss, 1.0, refused)
        actions.append(None if refused is None else refused.action)
    assert actions == ["skip", None, "skip", "skip", "stop"]


def test_steps_without_a_target_are_skipped_and_counted() -> None:
    made = guard(non_finite="stop", max_skips=1)
    first = made.no_target()
    made.note(math.nan, math.nan, first)
    assert first == Refusal("no_target", "skip") and made.no_target().action == "stop"


def test_a_guard_brought_back_judges_the_same() -> None:
    made = guard(history=57, spike="skip", spike_window_steps=30)
    made.note(math.nan, 1.0, made.judge(math.nan, 1.0))
    again = guard(spike="skip", spike_window_steps=30)
    again.load(json.loads(json.dumps(made.state())))
    assert again.state() == made.state() and again.in_a_row == 1
    assert [again.judge(x, 14.0) for x in (1.0, 3.0, 3.6, 9.0)] == [made.judge(x, 14.0) for x in (1.0, 3.0, 3.6, 9.0)]


def test_the_loss_scale_halves_and_gives_up_at_one() -> None:
    scale = LossScale()
    tries = 0
    while scale.smaller():
        tries += 1
        assert scale.value == FIRST / 2 ** tries
    assert tries == 16 and scale.value == FIRST  # it was not to blame


def test_the_loss_scale_doubles_after_a_while() -> None:
    scale = LossScale()
    assert scale.smaller()
    for _ in range(GROW_AFTER - 1):
        scale.settled(moved=True)
    scale.settled(moved=False)  # a refused step says nothing
    assert scale.value == FIRST / 2
    scale.settled(moved=True)
    assert scale.value == FIRST and scale.good_steps == 0


def test_a_loss_scale_brought_back_goes_on() -> None:
    scale = LossScale()
    scale.smaller()
    scale.settled(moved=True)
    again = LossScale()
    again.load(json.loads(json.dumps(scale.state())))
    assert (again.value, again.good_steps) == (FIRST / 2, 1)
    while again.smaller():
        pass
    assert again.value == FIRST / 2  # what it was before the step
