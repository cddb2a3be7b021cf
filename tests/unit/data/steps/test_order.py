"""Which examples form which step: epochs, and sources of different weight."""

from __future__ import annotations

import math
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.data.steps.windows import Sources, epoch_examples, epoch_of, epoch_order, epochs_done, global_batch

PARTS = st.lists(st.tuples(st.integers(1, 12), st.sampled_from([1.0, 2.0, 0.5, 0.3, 1.75])), min_size=1, max_size=3)
ONE = ((8, 1.0),)


@given(examples=st.integers(1, 50), size=st.integers(1, 20), seed=st.integers(0, 3))
def test_an_epoch_is_every_example_once(examples: int, size: int, seed: int) -> None:
    per_epoch = math.ceil(examples / size)
    for epoch in (0, 2):
        steps = [global_batch(seed=seed, step=epoch * per_epoch + n, parts=((examples, 1.0),), examples_per_step=size)
                 for n in range(per_epoch)]
        assert sorted(sum(steps, [])) == list(range(examples))
        assert [len(step) for step in steps[:-1]] == [size] * (per_epoch - 1)
        assert len(steps[-1]) == examples - size * (per_epoch - 1)


def test_the_order_is_the_documented_one() -> None:
    """PCG64 seeded with [seed, epoch]; written out, so that it cannot change unnoticed."""
    assert epoch_order(0, 0, ONE).tolist() == np.random.Generator(np.random.PCG64([0, 0])).permutation(8).tolist()
    assert epoch_order(0, 0, ONE).tolist() == [2, 4, 3, 6, 5, 0, 1, 7]
    assert epoch_order(0, 1, ONE).tolist() == [1, 3, 7, 6, 0, 4, 2, 5]
    assert global_batch(seed=0, step=0, parts=ONE, examples_per_step=3) == [2, 4, 3]
    assert global_batch(seed=0, step=2, parts=ONE, examples_per_step=3) == [1, 7]


@pytest.mark.parametrize("parts", [((10, 1.0),), ((4, 1.0), (6, 1.0)), ((1, 1), (2, 1), (7, 1))])
def test_sources_of_weight_one_are_as_one_source(parts: Sources) -> None:
    assert epoch_order(7, 3, parts).tolist() == [3, 5, 4, 7, 8, 0, 9, 2, 1, 6]
    assert global_batch(seed=7, step=9, parts=parts, examples_per_step=4) == [3, 5, 4, 7]


def test_weights_say_how_often_a_source_is_seen() -> None:
    """Twice each of 4, half of 6 (the other half in the next epoch), and a tenth of 5: two in four epochs."""
    parts = ((4, 2.0), (6, 0.5), (5, 0.1))
    epochs = [epoch_order(0, epoch, parts).tolist() for epoch in range(4)]
    for epoch in epochs:
        assert sorted(i for i in epoch if i < 4) == [0, 0, 1, 1, 2, 2, 3, 3]
    halves = [{i for i in epoch if 4 <= i < 10} for epoch in epochs]
    assert halves[0] | halves[1] == halves[2] | halves[3] == set(range(4, 10)) and len(halves[0]) == 3
    assert [sum(i >= 10 for i in epoch) for epoch in epochs] == [0, 1, 1, 0]
    assert epochs[0] == [2, 3, 3, 1, 0, 1, 2, 6, 5, 4, 0]  # written out, so that it cannot change unnoticed


@given(parts=PARTS, seed=st.integers(0, 2))
def test_however_weighted_a_source_is_seen_evenly(parts: list[tuple[int, float]], seed: int) -> None:
    """No example a second time more often than another of its source, and none before its source is through."""
    seen = np.concatenate([epoch_order(seed, epoch, tuple(parts)) for epoch in range(5)])
    times, first = np.bincount(seen, minlength=sum(examples for examples, _ in parts)), 0
    for examples, weight in parts:
        own = times[first:first + examples]
        assert np.ptp(own) <= 1 and own.sum() == round(5 * (weight * examples))
        first += examples
    assert len(seen) == sum(epoch_examples(tuple(parts), epoch) for epoch in range(5))


@given(parts=PARTS, size=st.integers(1, 20))
def test_every_step_is_the_next_piece_of_its_epoch(parts: list[tuple[int, float]], size: int) -> None:
    mix, step = tuple(parts), 0
    for epoch in range(6):
        order = epoch_order(1, epoch, mix).tolist()
        steps = math.ceil(len(order) / size)
        for place in range(steps):
            assert epoch_of(step, mix, size) == (epoch, place, steps)
            assert epochs_done(step, mix, size) == epoch + place / steps
            ids = global_batch(seed=1, step=step, parts=mix, examples_per_step=size)
            assert ids == order[place * size:(place + 1) * size]
            step += 1


def test_a_far_step_is_found_at_once() -> None:
    parts = ((1001, 0.3), (77, 1.5))
    began = time.perf_counter()
    epoch, place, steps = epoch_of(10_000_000, parts, 64)
    assert time.perf_counter() - began < 2
    # 415.8 examples an epoch are 415 or 416, 7 steps either way.
    assert (epoch, place, steps) == (*divmod(10_000_000, 7), 7)
    assert epoch_of(10**15 + 1, ((1000, 1.0),), 64) == (10**15 // 16, 1, 16)


def test_b61_epochs_and_seeds_have_orders_of_their_own() -> None:
    orders = [epoch_order(seed, epoch, ((16, 1.0),)).tolist() for seed in (0, 1) for epoch in (0, 1, 2)]
    assert len({tuple(order) for order in orders}) == 6
