"""Rows read as they are needed: each once an epoch, in another order each epoch, by the same policies."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from dist.given import write_texts
from shardwise.config.schema import FaultConfig
from shardwise.data.read import readers
from shardwise.data.read.readers import Unit
from shardwise.data.rows import Read
from shardwise.data.steps.stream import Cursor, Stream
from shardwise.data.store.examples import blocks
from shardwise.data.store.worker import mark
from shardwise.errors import DataError
from tokenised import data_of, epochs, opened, places, row, small_units, tokenizer, write_rows


def folder_of(tmp_path: Path, sizes: list[int]) -> Path:
    folder = tmp_path / "rows"
    folder.mkdir()
    for n, size in enumerate(sizes):
        write_rows(folder / f"{n}.jsonl", size, first=100 * n)
    return folder


@pytest.mark.parametrize("sizes", [[10], [4, 3, 5], [40, 1, 30]])
@pytest.mark.parametrize("bytes_per_unit", [4 << 20, 400])
def test_b60_each_row_once_an_epoch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sizes: list[int],
                                    bytes_per_unit: int) -> None:
    small_units(monkeypatch, bytes_per_unit)
    folder = folder_of(tmp_path, sizes)
    one = epochs(Stream(data_of(folder), tokenizer(), seed=0), 3)
    wanted = sorted(f"{folder}/{n}.jsonl:{line}" for n, size in enumerate(sizes) for line in range(1, size + 1))
    assert [sorted(places(epoch)) for epoch in one] == [wanted] * 3
    assert len({tuple(places(epoch)) for epoch in one}) == 3  # three orders

    another_rank = epochs(Stream(data_of(folder), tokenizer(), seed=0), 3)
    assert [places(epoch) for epoch in another_rank] == [places(epoch) for epoch in one]
    other_seed = epochs(Stream(data_of(folder), tokenizer(), seed=1), 3)
    assert all(places(a) != places(b) for a, b in zip(one, other_seed, strict=True))


def test_pieces_are_read_four_at_a_time_and_not_again_when_going_on(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = folder_of(tmp_path, [5] * 10)
    stream = Stream(data_of(folder), tokenizer(), seed=0)
    read: list[str] = []

    def watched(unit: Unit) -> Iterator[Read]:
        read.append(unit.file.path.name)
        return readers.read(unit)

    monkeypatch.setattr("shardwise.data.steps.stream.read", watched)
    whole = list(islice(stream.examples(Cursor()), 50))
    assert len(read) == 10
    read.clear()
    assert len(list(islice(stream.examples(Cursor()), 20))) == 20 and len(read) == 4
    first_of_third = next(n for n, example in enumerate(whole) if example is not None and example.after.group == 2)
    assert first_of_third == 40
    read.clear()
    cursor = whole[first_of_third].after  # type: ignore[union-attr]
    rest = list(islice(stream.examples(cursor), 9))
    assert [example.place for example in rest] == [example.place for example in whole[41:]]  # type: ignore[union-attr]
    assert len(read) == 2


def test_it_gives_what_the_cache_gives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same ids and weights, also where a row gives several examples."""
    monkeypatch.setenv("SHARDWISE_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "a.jsonl"
    turns = [message for n in range(6) for message in row(n)["messages"]]
    path.write_text("".join(json.dumps({"messages": turns[:2 * n]}) + "\n" for n in range(1, 7)))
    settings: dict[str, Any] = {"max_length": 80, "on_too_long": "split"}
    stored = opened(path, **settings)
    assert len(stored.index["line"]) > 6
    (streamed,) = epochs(Stream(data_of(path, **settings), tokenizer(), seed=0), 1)

    def sortable(place: str, ids: Any, weights: Any) -> tuple[str, list[int], list[float]]:
        return place, ids.tolist(), weights.tolist()

    assert sorted(sortable(e.place, e.encoded.ids, e.encoded.weights) for e in streamed) == sorted(
        sortable(stored.place(n), stored.ids[a:b], stored.weights[a:b])
        for n, (a, b) in enumerate(zip(stored.starts[:-1], stored.starts[1:], strict=True)))


@pytest.mark.parametrize("length", [2, 7, 8, 16, 1000])
def test_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, length: int) -> None:
    """Documents shorter and longer than a block: nothing is lost but a last single token, and places are right."""
    monkeypatch.setenv("SHARDWISE_CACHE", str(tmp_path / "cache"))
    texts = write_texts(tmp_path / "a.jsonl", ["x" * n for n in (1, 30, 3, 6, 7, 8, 15, 2)])
    stored = opened(texts, task="pretrain")
    documents = {stored.place(n): stored.ids[stored.starts[n]:stored.starts[n + 1]].tolist() for n in range(8)}
    data = data_of(texts, task="pretrain", max_length=length)
    for epoch in epochs(Stream(data, tokenizer(), seed=3), 2):
        ids = [e.encoded.ids.tolist() for e in epoch]
        assert [len(block) for block in ids[:-1]] == [length] * (len(ids) - 1)
        assert [(e.encoded.weights[0], e.encoded.weights[1:].min()) for e in epoch] == [(0, 1)] * len(epoch)
        assert len(epoch) == len(blocks([stored], [1.0], length))
        flat = [token for block in ids for token in block]
        assert len(stored.ids) - len(flat) == (len(stored.ids) % length == 1)
        owners = owners_of(flat, documents)
        assert [e.place for e in epoch] == [owners[sum(map(len, ids[:n]))] for n in range(len(ids))]


def owners_of(flat: list[int], documents: dict[str, list[int]]) -> list[str]:
    """Whose each token is: documents end with EOS, and no two are alike."""
    owners: list[str] = []
    left = dict(documents)
    while len(owners) < len(flat):
        rest = flat[len(owners):]
        (place,) = [place for place, ids in left.items() if ids[:len(rest)] == rest[:len(ids)]][:1]
        owners += [place] * len(left.pop(place))
    return owners


def test_policies(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    marker = {"messages": [{"role": "user", "content": "<|im_end|>?"}, {"role": "assistant", "content": "a mark"}]}
    rows = [row(0), {"messages": []}, marker, row(3), {"x": 1}]
    path.write_text("".join(json.dumps(value) + "\n" for value in rows))

    def run(held_out: frozenset[int] = frozenset(), **policies: Any) -> tuple[list[str], dict[str, int]]:
        fates = {"no_messages": "drop", "wrong_schema": "drop", "marker_text": "report"} | policies
        stream = Stream(data_of(path, on_fault=FaultConfig(**fates)), tokenizer(), seed=0, held_out=held_out)
        (epoch,) = epochs(stream, 1)
        return sorted(places(epoch)), stream.dropped

    assert run() == ([f"{path}:{n}" for n in (1, 3, 4)], {"no_messages": 1, "wrong_schema": 1})
    assert run(marker_text="drop") == ([f"{path}:{n}" for n in (1, 4)],
                                       {"no_messages": 1, "wrong_schema": 1, "marker_text": 1})
    for kind, line in (("no_messages", 2), ("marker_text", 3), ("wrong_schema", 5)):
        with pytest.raises(DataError, match=rf"{path}:{line}: .*data\.on_fault\.{kind}=drop"):
            run(frozenset(), **{kind: "error"})
    seen = frozenset([mark(next(e for e in epochs(Stream(data_of(path, on_fault=FaultConfig(
        no_messages="drop", wrong_schema="drop", marker_text="report")), tokenizer(), seed=0), 1)[0]
        if e.place.endswith(":4")).encoded.ids)])
    with pytest.raises(DataError, match=rf"{path}:4: .*\(eval_overlap\)"):
        run(seen)
    assert run(seen, eval_overlap="report")[0] == [f"{path}:{n}" for n in (1, 3, 4)]
    with pytest.raises(DataError, match=r"b\.jsonl:\d: .*data\.on_too_long=drop"):
        epochs(Stream(data_of(write_rows(tmp_path / "b.jsonl", 3), max_length=5), tokenizer(), seed=0), 1)


def test_nothing_usable_is_an_error_and_not_an_endless_search(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    for text in ('{"messages": []}\n' * 3, "", "\n"):
        path.write_text(text)
        stream = Stream(data_of(path, on_fault=FaultConfig(no_messages="drop")), tokenizer(), seed=0)
        with pytest.raises(DataError, match="no usable example in a whole epoch"):
            next(stream.examples(Cursor()))
