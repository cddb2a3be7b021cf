"""Global batches from a stream: going on from any step's state gives the very batches that would have come."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from dist.given import TOKENIZER, write_texts
from launched import ROOT, environment
from shardwise.config.schema import DataConfig, FaultConfig
from shardwise.data.steps import feed as feeds
from shardwise.data.steps import stream as streams
from shardwise.data.steps.feed import StoredFeed, StreamFeed
from shardwise.data.steps.stream import Stream
from shardwise.data.store.load import load_data
from shardwise.errors import DataError
from tokenised import data_of, row, small_units, tokenizer, write_rows

Batch = list[tuple[str, list[int], list[float]]]


def feed_of(data: DataConfig, size: int, state: dict[str, Any] | None = None) -> StreamFeed:
    return StreamFeed(Stream(data, tokenizer(), seed=0), examples_per_step=size, state=state)


def next_batch(feed: StreamFeed, step: int) -> Batch:
    rows, ids = feed.batch(step)
    batch = [(rows.place(i), *(column.tolist() for column in rows.get([i])[0])) for i in ids]
    assert rows.lengths[ids].tolist() == [len(tokens) for _, tokens, _ in batch]
    assert rows.supervised[ids].tolist() == [sum(w > 0 for w in weights) for _, _, weights in batch]
    assert rows.target_weight[ids].tolist() == [sum(weights) for _, _, weights in batch]
    return batch


def chats(tmp_path: Path) -> DataConfig:
    """Of 1 to 12 turns, of which the longer ones become several examples; one row is dropped."""
    turns = [message for n in range(6) for message in row(n)["messages"]]
    for name, some in (("a", range(1, 7)), ("b", range(6, 0, -1)), ("c", (6, 6))):
        lines = [json.dumps({"messages": turns[:2 * n]}) + "\n" for n in some]
        (tmp_path / f"{name}.jsonl").write_text("".join(lines) + '{"messages": []}\n' * (name == "b"))
    return data_of(*sorted(tmp_path.glob("*.jsonl")), max_length=80, on_too_long="split",
                   on_fault=FaultConfig(no_messages="drop"))


def texts(tmp_path: Path) -> DataConfig:
    """Documents shorter and longer than a block, some of which end where a block does."""
    first = write_texts(tmp_path / "a.jsonl", ["x" * n for n in (1, 90, 3, 6, 7, 8, 15, 2, 40)])
    second = write_texts(tmp_path / "b.jsonl", ["some words " * n for n in range(1, 12)])
    return data_of(first, second, task="pretrain", max_length=8)


@pytest.mark.parametrize("kind", ["chats", "texts"])
@pytest.mark.parametrize("size", [1, 3, 8])
@pytest.mark.parametrize("pieces", [(4 << 20, 4), (300, 2)])
def test_going_on_after_any_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, size: int,
                                 pieces: tuple[int, int]) -> None:
    small_units(monkeypatch, pieces[0])
    monkeypatch.setattr(streams, "PIECES_AT_ONCE", pieces[1])
    data = {"chats": chats, "texts": texts}[kind](tmp_path)
    straight, step = feed_of(data, size), 0
    batches: list[Batch] = []
    states: list[str] = [json.dumps(straight.state())]
    while straight.epochs(step) < 3 or len(batches) < 5:
        batches.append(next_batch(straight, step))
        states.append(json.dumps(straight.state()))
        step += 1
    stride = max(1, len(batches) // 40)  # every step of few; of very many a sample
    for k in range(0, len(batches), stride):
        resumed = feed_of(data, size, json.loads(states[k]))
        for n in range(k, min(k + 4, len(batches))):
            assert next_batch(resumed, n) == batches[n], (k, n)
            assert json.dumps(resumed.state()) == states[n + 1]
    if kind == "chats":
        assert max(state["stream"]["part"] for state in map(json.loads, states)) > 0 or size > 1  # inside a row


def test_a_batch_never_mixes_epochs(tmp_path: Path) -> None:
    """10 rows by 4: 4, 4 and 2 of each epoch."""
    path = write_rows(tmp_path / "a.jsonl", 10)
    feed = feed_of(data_of(path), 4)
    assert feed.epochs(0) == 0.0
    batches = [next_batch(feed, step) for step in range(9)]
    assert [len(batch) for batch in batches] == [4, 4, 2] * 3
    for epoch in range(3):
        seen = [place for batch in batches[3 * epoch:3 * epoch + 3] for place, _, _ in batch]
        assert sorted(seen) == sorted(f"{path}:{n}" for n in range(1, 11))
    assert feed.epochs(9) == 3.0
    whole = feed_of(data_of(path), 5)  # 5 and 5: no empty batch between the epochs
    assert [len(next_batch(whole, step)) for step in range(4)] == [5] * 4


def test_the_same_on_two_ranks(tmp_path: Path) -> None:
    data = data_of(write_rows(tmp_path / "a.jsonl", 10))
    one, other = feed_of(data, 3), feed_of(data, 3)
    assert [next_batch(one, n) for n in range(8)] == [next_batch(other, n) for n in range(8)]


def test_stored_data_needs_no_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDWISE_CACHE", str(tmp_path / "cache"))
    train = load_data(data_of(write_rows(tmp_path / "a.jsonl", 10)), tokenizer()).train
    feed = StoredFeed(train, seed=0, examples_per_step=4)
    steps = [feed.batch(n)[1] for n in range(6)]
    assert sorted(sum(steps[:3], [])) == sorted(sum(steps[3:], [])) == list(range(10))
    assert StoredFeed(train, seed=0, examples_per_step=4).batch(4)[1] == steps[4]
    assert feed.state() == {} and feed.epochs(3) == 1.0 and feed.epochs(4) == 1 + 1 / 3


def test_an_error_of_the_reading_thread_reaches_the_caller(tmp_path: Path) -> None:
    """After the batches before it, and as often as one asks."""
    path = write_rows(tmp_path / "a.jsonl", 9)
    with path.open("a") as file:
        file.write('{"messages": []}\n')
    feed = feed_of(data_of(path), 1)
    seen = []
    with pytest.raises(DataError, match=rf"{path}:10: .*no_messages"):
        for step in range(11):
            seen += next_batch(feed, step)
    order = [place for batch in [seen] for place, _, _ in batch]
    assert f"{path}:10" not in order and len(order) < 10
    with pytest.raises(DataError, match="no_messages"):
        feed.batch(11)


def test_what_nobody_foresaw_reaches_the_caller_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Stream(data_of(write_rows(tmp_path / "a.jsonl", 9)), tokenizer(), seed=0)
    monkeypatch.setattr(stream, "_groups", lambda *more: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        StreamFeed(stream, examples_per_step=1).batch(0)


def test_it_reads_ahead_but_not_on_and_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    inner = feeds.HeldRows

    def counted(some: Any) -> feeds.HeldRows:
        made.append(len(some))
        return inner(some)

    monkeypatch.setattr(feeds, "HeldRows", counted)
    feed = feed_of(data_of(write_rows(tmp_path / "a.jsonl", 50)), 2)
    time.sleep(0.5)
    assert len(made) == feeds.STEPS_AHEAD + 1  # the last one waits for room
    feed.batch(0)
    time.sleep(0.2)
    assert len(made) == feeds.STEPS_AHEAD + 2


END = """
import sys
from pathlib import Path
from shardwise.config.schema import DataConfig, ModelConfig, SourceConfig
from shardwise.data.steps.feed import StreamFeed
from shardwise.data.steps.stream import Stream
from shardwise.data.tokenizer import load_tokenizer

kind, place, tokenizer = sys.argv[1:]
stream = Stream(DataConfig(train=(SourceConfig(**{kind: place}),)), load_tokenizer(ModelConfig(tokenizer=tokenizer)),
                seed=0)
feeds = [StreamFeed(stream, examples_per_step=size) for size in (2, 300, 100000)]  # idle, busy, busy for long
print([len(feed.batch(0)[1]) for feed in feeds[:2]])
"""


@pytest.mark.parametrize("kind", ["path", "hub"])
def test_the_thread_keeps_no_process_alive(tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "set"
    folder.mkdir()
    write_rows(folder / "train.jsonl", 3000)
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", END, kind, str(folder), str(TOKENIZER)], cwd=ROOT, text=True,
                          env=environment(HF_DATASETS_CACHE=str(tmp_path / "hf")), capture_output=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "[2, 300]\n", "")
    assert time.monotonic() - began < 30


def test_threads_of_feeds_are_daemons(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    feed_of(data_of(write_rows(tmp_path / "a.jsonl", 9)), 1)
    assert all(thread.daemon for thread in set(threading.enumerate()) - before)
