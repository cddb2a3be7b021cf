"""Hub data sets streamed: a local folder stands in for the hub."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from shardwise.config.schema import DataConfig, SourceConfig
from shardwise.data.steps import stream as streams
from shardwise.data.steps.stream import Stream
from shardwise.errors import DataError
from tokenised import data_of, epochs, places, row, tokenizer, write_rows


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_hub_data_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """As a local folder; beside a file. Its rows are shuffled in groups, and the groups follow the files'."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "hf"))
    monkeypatch.setattr(streams, "ROWS_AT_ONCE", 8)
    folder = tmp_path / "set"
    folder.mkdir()
    rows = [row(100 + n) for n in range(20)]
    if kind == "jsonl":
        (folder / "train.jsonl").write_text("".join(json.dumps(value) + "\n" for value in rows))
    else:
        pq.write_table(pa.Table.from_pylist(rows), folder / "train.parquet")
    path = write_rows(tmp_path / "a.jsonl", 5)
    data = DataConfig(train=(SourceConfig(hub=str(folder)), SourceConfig(path=str(path))))
    first, second = epochs(Stream(data, tokenizer(), seed=0), 2)
    names = [[f"{path}:{n}" for n in range(1, 6)]] + [
        [f"{folder}[train]:{n}" for n in some] for some in (range(1, 9), range(9, 17), range(17, 21))]
    for epoch in (first, second):
        groups = [sorted(places(epoch)[a:b]) for a, b in ((0, 5), (5, 13), (13, 21), (21, 25))]
        assert groups == [sorted(some) for some in names]
    assert places(first) != places(second)
    by_place = {e.place: e.encoded.ids.tolist() for e in first}
    (plain,) = epochs(Stream(data_of(write_rows(tmp_path / "b.jsonl", 20, first=100)), tokenizer(), seed=0), 1)
    assert all(by_place[f"{folder}[train]:{e.place.rpartition(':')[2]}"] == e.encoded.ids.tolist() for e in plain)
    for k in (4, 7, 14, 23):
        rest = epochs(Stream(data, tokenizer(), seed=0), 2, first[k].after)
        assert [places(rest[0]), places(rest[1])] == [places(first)[k + 1:], places(second)]


def test_a_broken_hub_data_set_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "hf"))
    data = DataConfig(train=(SourceConfig(hub=str(tmp_path / "nothing"), split="train"),))
    with pytest.raises(DataError, match="data set .*nothing'"):
        Stream(data, tokenizer(), seed=0)
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "train.jsonl").write_text(json.dumps(row(0)) + "\n{broken\n")
    with pytest.raises(DataError, match="data set .*set'"):
        epochs(Stream(DataConfig(train=(SourceConfig(hub=str(tmp_path / "set")),)), tokenizer(), seed=0), 1)
