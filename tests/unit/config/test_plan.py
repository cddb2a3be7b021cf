"""Optimizer steps of a run from the sizes of its epochs."""

from __future__ import annotations

import pytest

from shardwise.config.resolve import plan_steps
from shardwise.config.schema import BatchConfig, Config, ScheduleConfig
from shardwise.errors import ConfigError


def steps(sizes: list[int], **schedule: float) -> int:
    config = Config(batch=BatchConfig(examples_per_step=4), schedule=ScheduleConfig(**schedule))
    return plan_steps(config, lambda epoch: sizes[epoch % len(sizes)]).num_steps


@pytest.mark.parametrize(("epochs", "count"), [(1.0, 10), (3.0, 30), (0.5, 5), (1.1, 11), (2.3, 23), (0.01, 1),
                                               (1.01, 11)])
def test_epochs_alike(epochs: float, count: int) -> None:
    """38 examples by 4 are 10 steps; a started step is done."""
    assert steps([38], epochs=epochs) == count


@pytest.mark.parametrize(("epochs", "count"), [(1.0, 2), (2.0, 5), (3.0, 5), (4.0, 7), (1.5, 4), (2.5, 5)])
def test_epochs_that_differ(epochs: float, count: int) -> None:
    """8, 9 and 0 examples: 2, 3 and 0 steps."""
    assert steps([8, 9, 0], epochs=epochs) == count


def test_max_steps_and_the_first_epoch() -> None:
    config = Config(batch=BatchConfig(examples_per_step=4), schedule=ScheduleConfig(max_steps=99))
    plan = plan_steps(config, [9, 8].__getitem__)
    assert (plan.examples, plan.steps_per_epoch, plan.num_steps) == (9, 3, 99)


def test_no_example() -> None:
    with pytest.raises(ConfigError, match="data.train holds no usable example"):
        steps([0], epochs=1.0)
