"""cases.md, theme 9 (B61): epochs have orders of their own, the same at every start, whatever the ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from shardwise.data.steps.feed import Feed, StoredFeed, StreamFeed
from shardwise.data.steps.stream import Stream
from shardwise.data.steps.windows import split
from shardwise.data.store.load import load_data
from tokenised import data_of, tokenizer, write_rows

ROWS, EPOCHS, PER_STEP, RANKS = 16, 3, 8, 2


@pytest.fixture(params=["stored", "streamed"])
def feeding(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Feed]:
    """Makes a feed of 16 rows for a seed, as a fresh start would."""
    monkeypatch.setenv("SHARDWISE_CACHE", str(tmp_path / "cache"))
    data = data_of(write_rows(tmp_path / "a.jsonl", ROWS))

    def make(seed: int) -> Feed:
        if request.param == "stored":
            return StoredFeed(load_data(data, tokenizer()).train, seed=seed, examples_per_step=PER_STEP)
        return StreamFeed(Stream(data, tokenizer(), seed=seed), examples_per_step=PER_STEP)
    return make


def lines(feed: Feed) -> tuple[list[list[int]], list[list[set[int]]]]:
    """Of each epoch the rows in their order, and of each step the rows of each rank."""
    orders: list[list[int]] = [[] for _ in range(EPOCHS)]
    shares = []
    for step in range(EPOCHS * ROWS // PER_STEP):
        rows, ids = feed.batch(step)
        line = {i: int(rows.place(i).rpartition(":")[2]) for i in ids}
        orders[step * PER_STEP // ROWS] += [line[i] for i in ids]
        window = split(ids, np.asarray(rows.lengths), world_size=RANKS, max_tokens=128, packing=True)
        shares.append([{line[i] for micro in share for row in micro for i in row} for share in window])
    return orders, shares


def test_b61_same_order_every_epoch(feeding: Callable[[int], Feed]) -> None:
    orders, shares = lines(feeding(0))
    assert [sorted(order) for order in orders] == [list(range(1, ROWS + 1))] * EPOCHS
    assert len({tuple(order) for order in orders}) == EPOCHS
    for step, (one, other) in enumerate(shares):
        assert one and other and not one & other  # no row twice, and neither rank idle
        epoch, place = divmod(step * PER_STEP, ROWS)
        assert one | other == set(orders[epoch][place:place + PER_STEP])
    assert lines(feeding(0)) == (orders, shares)  # started twice
    others, _ = lines(feeding(1))
    assert all(mine != theirs for mine, theirs in zip(orders, others, strict=True))
