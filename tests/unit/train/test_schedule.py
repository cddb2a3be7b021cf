"""The learning rate of every step (B05: the list is exact)."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.config.resolve import StepPlan
from shardwise.config.schema import ScheduleConfig
from shardwise.train.schedule import lr_at


def rates(kind: str, steps: int, *, warmup: int = 0, peak: float = 1.0, **more: float) -> list[float]:
    plan = StepPlan(examples=steps, steps_per_epoch=steps, num_steps=steps, warmup_steps=warmup)
    schedule = ScheduleConfig(kind=kind, **more)  # type: ignore[arg-type]
    return [lr_at(step, peak=peak, plan=plan, schedule=schedule) for step in range(steps)]


def test_b05_linear_over_six_steps() -> None:
    assert rates("linear", 6) == pytest.approx([1, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6], abs=1e-15)


@pytest.mark.parametrize(("kind", "more", "want"), [
    ("constant", {}, [1.0, 1.0, 1.0, 1.0]),
    ("cosine", {}, [1.0, 0.5 + math.sqrt(0.125), 0.5, 0.5 - math.sqrt(0.125)]),
    ("cosine", {"min_lr_ratio": 0.2}, [1.0, 0.2 + 0.8 * (0.5 + math.sqrt(0.125)), 0.6,
                                       0.2 + 0.8 * (0.5 - math.sqrt(0.125))]),
    ("linear", {"min_lr_ratio": 0.5}, [1.0, 0.875, 0.75, 0.625]),
    ("wsd", {"decay_ratio": 0.5}, [1.0, 1.0, 1.0, 0.5]),
    ("wsd", {"decay_ratio": 0.0}, [1.0, 1.0, 1.0, 1.0]),
    ("inverse_sqrt", {}, [1.0, math.sqrt(1 / 2), math.sqrt(1 / 3), math.sqrt(1 / 4)]),
])
def test_shapes_without_warm_up(kind: str, more: dict[str, float], want: list[float]) -> None:
    assert rates(kind, 4, **more) == pytest.approx(want, abs=1e-12)


def test_inverse_sqrt_falls_as_the_root_of_the_step() -> None:
    """After w warm-up steps the rate at step s is peak * sqrt(w / s)."""
    assert rates("inverse_sqrt", 12, warmup=4)[4:] == pytest.approx([math.sqrt(4 / s) for s in range(4, 12)])


@pytest.mark.parametrize("kind", ["cosine", "linear", "constant", "wsd", "inverse_sqrt"])
def test_warm_up_rises_to_the_peak(kind: str) -> None:
    got = rates(kind, 10, warmup=3, peak=4e-3)
    assert got[:4] == pytest.approx([1e-3, 2e-3, 3e-3, 4e-3])
    assert max(got) == got[3]


def test_all_steps_may_be_warm_up() -> None:
    assert rates("cosine", 3, warmup=3) == pytest.approx([0.25, 0.5, 0.75])


@given(kind=st.sampled_from(["cosine", "linear", "constant", "wsd", "inverse_sqrt"]), steps=st.integers(1, 60),
       warmup=st.integers(0, 60), floor=st.floats(0, 1), decay=st.floats(0, 1))
def test_every_schedule_rises_then_falls_within_its_bounds(kind: str, steps: int, warmup: int, floor: float,
                                                           decay: float) -> None:
    warmup = min(warmup, steps)
    got = rates(kind, steps, warmup=warmup, min_lr_ratio=floor, decay_ratio=decay)
    assert all(0.0 < rate <= 1.0 + 1e-12 for rate in got)
    assert all(a < b for a, b in zip(got[:warmup], got[1:warmup], strict=False))
    after = got[warmup:]
    assert all(a >= b - 1e-12 for a, b in zip(after, after[1:], strict=False))
    assert all(rate >= floor - 1e-12 for rate in after)
    assert not after or after[0] == pytest.approx(1.0) or (kind == "wsd" and decay > (steps - warmup) / steps)
