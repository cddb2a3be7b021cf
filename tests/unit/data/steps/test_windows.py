"""Which example of a step goes into which micro-batch of which rank."""

from __future__ import annotations

import math
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.data.steps.windows import Window, cost, rounded, split
from shardwise.errors import DataError

LENGTHS = st.lists(st.integers(2, 60), min_size=1, max_size=40).map(lambda some: np.asarray(some, np.int32))
SPLITS = st.fixed_dictionaries({"world_size": st.integers(1, 9), "max_tokens": st.integers(60, 300),
                                "packing": st.booleans()})


PACKED = st.fixed_dictionaries({"world_size": st.integers(1, 5), "max_tokens": st.integers(60, 200)})


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
