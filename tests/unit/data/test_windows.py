"""Which example goes into which micro-batch of which rank."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.data.windows import Window, cost, epoch_order, global_batch, rounded, split
from shardwise.errors import DataError

LENGTHS = st.lists(st.integers(2, 60), min_size=1, max_size=40).map(lambda some: np.asarray(some, np.int32))
SPLITS = st.fixed_dictionaries({"world_size": st.integers(1, 9), "max_tokens": st.integers(60, 300),
                                "packing": st.booleans()})


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


@given(examples=st.integers(1, 50), size=st.integers(1, 20), seed=st.integers(0, 3))
def test_an_epoch_is_every_example_once(examples: int, size: int, seed: int) -> None:
    per_epoch = math.ceil(examples / size)
    for epoch in (0, 2):
        steps = [global_batch(seed=seed, step=epoch * per_epoch + n, examples=examples, examples_per_step=size)
                 for n in range(per_epoch)]
        assert sorted(sum(steps, [])) == list(range(examples))
        assert [len(step) for step in steps[:-1]] == [size] * (per_epoch - 1)
        assert len(steps[-1]) == examples - size * (per_epoch - 1)


def test_the_order_is_the_documented_one() -> None:
    """PCG64 seeded with [seed, epoch]; written out, so that it cannot change unnoticed."""
    assert epoch_order(0, 0, 8).tolist() == np.random.Generator(np.random.PCG64([0, 0])).permutation(8).tolist()
    assert epoch_order(0, 0, 8).tolist() == [2, 4, 3, 6, 5, 0, 1, 7]
    assert global_batch(seed=0, step=0, examples=8, examples_per_step=3) == [2, 4, 3]
    assert global_batch(seed=0, step=2, examples=8, examples_per_step=3) == [1, 7]


def test_b61_epochs_and_seeds_have_orders_of_their_own() -> None:
    orders = [epoch_order(seed, epoch, 16).tolist() for seed in (0, 1) for epoch in (0, 1, 2)]
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
