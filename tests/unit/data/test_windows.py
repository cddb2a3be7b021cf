"""Which examples form a step, and which of them goes into which micro-batch of which rank."""

from __future__ import annotations

import math
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.data.windows import (
    Sources,
    Window,
    cost,
    epoch_examples,
    epoch_of,
    epoch_order,
    epochs_done,
    global_batch,
    rounded,
    split,
)
from shardwise.errors import DataError

LENGTHS = st.lists(st.integers(2, 60), min_size=1, max_size=40).map(lambda some: np.asarray(some, np.int32))
SPLITS = st.fixed_dictionaries({"world_size": st.integers(1, 9), "max_tokens": st.integers(60, 300),
                                "packing": st.booleans()})


PACKED = st.fixed_dictionaries({"world_size": st.integers(1, 5), "max_tokens": st.integers(60, 200)})
PARTS = st.lists(st.tuples(st.integers(1, 12), st.sampled_from([1.0, 2.0, 0.5, 0.3, 1.75])), min_size=1, max_size=3)
ONE = ((8, 1.0),)


def ids_of(window: Window) -> list[int]:
    return [example for share in window for micro in share for row in micro for example in row]


@given(lengths=LENGTHS, how=SPLITS)
def test_a_split_keeps_every_example_once_and_every_limit(lengths: np.ndarray, how: dict[str, int]) -> None:
    window = split(range(len(lengths)), lengths, **how)
    assert sorted(ids_of(window)) == list(range(len(lengths)))
    assert len(window) == how["world_size"]
    assert len({len(share) for share in window}) == 1 and window[0]  # collectives need equal counts, at least 1
    for share in window:
        for micro in share:
            assert cost(micro, lengths) <= how["max_tokens"]
            assert all(micro)  # no empty row
            assert len(micro) <= 1 or not how["packing"]
            assert all(len(row) == 1 for row in micro) or how["packing"]


@given(lengths=LENGTHS, how=SPLITS, seed=st.integers(0, 5))
def test_a_split_is_a_function_of_the_set_of_examples(lengths: np.ndarray, how: dict[str, int], seed: int) -> None:
    """Deterministic, and the order in which a step lists its examples does not matter."""
    shuffled = np.random.default_rng(seed).permutation(len(lengths)).tolist()
    assert split(range(len(lengths)), lengths, **how) == split(shuffled, lengths, **how)


@given(lengths=LENGTHS, how=SPLITS)
def test_a_rank_waits_for_no_more_than_it_must(lengths: np.ndarray, how: dict[str, int]) -> None:
    """No more micro-batches than examples need, and no rank without work while another has two rows to give."""
    window = split(range(len(lengths)), lengths, **how)
    busy = sum(bool(micro) for share in window for micro in share)
    assert busy >= min(len(lengths), how["world_size"])
    assert len(window[0]) <= math.ceil(len(lengths) / how["world_size"])


def evenly(lengths: np.ndarray, count: int, max_tokens: int) -> bool:
    """Whether longest first into the emptiest of `count` rows stays within the limit."""
    rows = [0] * count
    for length in sorted(lengths.tolist(), reverse=True):
        rows[rows.index(min(rows))] += length
    return max(rows) <= max_tokens


@given(lengths=LENGTHS, how=PACKED)
def test_packing_takes_as_few_as_it_can_find(lengths: np.ndarray, how: dict[str, int]) -> None:
    """Within the bounds of any packing, and never more than filling evenly would take."""
    ranks, limit, total = how["world_size"], how["max_tokens"], int(lengths.sum())
    count = sum(map(len, split(range(len(lengths)), lengths, packing=True, **how)))
    assert count >= ranks * math.ceil(total / (ranks * limit))
    assert (count - ranks) * limit < 2 * total  # best fit leaves no two rows that would go into one
    assert not any(evenly(lengths, fewer, limit) for fewer in range(ranks, count, ranks))


@given(lengths=LENGTHS, how=SPLITS)
def test_ranks_cost_alike(lengths: np.ndarray, how: dict[str, int]) -> None:
    """Two ranks differ by no more than two micro-batches of one turn do, or by one example if filled evenly."""
    window = split(range(len(lengths)), lengths, **how)
    costs = np.asarray([[cost(micro, lengths) for micro in share] for share in window])
    assert (np.diff(costs, axis=1) <= 0).all()
    assert np.ptp(costs.sum(1)) <= np.ptp(costs, axis=0).max()
    assert (costs[:, :-1].min(axis=0) >= costs[:, 1:].max(axis=0)).all()
    if how["packing"] and evenly(lengths, costs.size, how["max_tokens"]):
        assert np.ptp(costs.sum(1)) <= lengths.max()


def test_best_fit_needs_fewer_than_filling_evenly() -> None:
    """Three rows of 20: evenly, they hold 19 each when the last 3 comes."""
    lengths = np.asarray([11, 9, 8, 7, 6, 5, 4, 4, 3, 3], np.int32)
    assert not evenly(lengths, 3, 20) and lengths.sum() == 60
    window = split(range(10), lengths, world_size=1, max_tokens=20, packing=True)
    assert [cost(micro, lengths) for micro in window[0]] == [20, 20, 20]


def test_an_example_may_be_in_a_step_twice() -> None:
    window = split([1, 0, 1], np.asarray([5, 9], np.int32), world_size=1, max_tokens=10, packing=True)
    assert window == [[[[1]], [[1]], [[0]]]]


def test_a_large_step_is_split_fast() -> None:
    lengths = np.random.default_rng(0).integers(690, 1000, 10_000)  # pairs; by their sum three would fit a row
    began = time.perf_counter()
    window = split(range(10_000), lengths, world_size=2, max_tokens=2048, packing=True)
    assert len(window[0]) == 2500 and time.perf_counter() - began < 2  # some 0.1 s; trying every count takes 6 s


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


def test_ranks_get_alike_work() -> None:
    lengths = np.asarray([100, 90, 80, 70, 20, 20, 10, 10], np.int32)
    window = split(range(8), lengths, world_size=2, max_tokens=100, packing=True)
    assert [[cost(micro, lengths) for micro in share] for share in window] == [[100, 100], [100, 100]]


def test_a_padded_step_of_one_example_leaves_the_other_rank_a_filler() -> None:
    assert split([3], np.asarray([5, 5, 5, 9], np.int32), world_size=2, max_tokens=9, packing=False) == [[[[3]]], [[]]]


def test_an_example_longer_than_a_micro_batch_is_refused() -> None:
    with pytest.raises(DataError, match="example 1 has 1,200 tokens, more than batch.max_tokens_per_micro_batch=1,024"):
        split([0, 1], np.asarray([7, 1200], np.int32), world_size=1, max_tokens=1024, packing=True)


def test_few_shapes_and_little_added() -> None:
    sizes = range(1, 5000)
    assert all(rounded(n) >= n and rounded(n) - n < max(8, n / 15.9) for n in sizes)
    assert len({rounded(n) for n in range(512, 1024)}) == 17
    assert [rounded(n) for n in (1, 8, 9, 256, 257, 1000, 1025)] == [8, 8, 16, 256, 272, 1024, 1088]
