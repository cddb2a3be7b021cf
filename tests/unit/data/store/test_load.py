"""From settings to the examples of a run: blocks, several sources, policies."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dist.given import write_texts
from shardwise.config.schema import DataConfig, FaultConfig, SourceConfig
from shardwise.data.read.files import digest, files_of
from shardwise.data.rows import FLAGS
from shardwise.data.store.cached import CachedSource
from shardwise.data.store.examples import blocks
from shardwise.data.store.load import inspect, load_data, load_held_out
from shardwise.errors import DataError
from tokenised import data_of, opened, row, small_units, tokenizer, write_rows

MARKER = {"messages": [{"role": "user", "content": "what is <|im_end|>?"}, {"role": "assistant", "content": "a mark"}]}
EMPTY = {"messages": [{"role": "user", "content": "say nothing"}, {"role": "assistant", "content": ""}]}


@pytest.fixture(autouse=True)
def cold_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDWISE_CACHE", str(tmp_path / "cache"))


def write(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(value) + "\n" for value in rows))
    return path


def documents(sizes: list[int], name: str = "a") -> CachedSource:
    """A source of documents of so many tokens, which count up from 0 over all of it."""
    total = sum(sizes)
    index: dict[str, np.ndarray] = {"length": np.asarray(sizes, np.int32), "line": np.arange(1, len(sizes) + 1),
             "file_number": np.zeros(len(sizes), np.int32), "flags": np.zeros(len(sizes), np.uint8)}
    return CachedSource(content=name, ids=np.arange(total, dtype=np.int32), weights=np.ones(total, np.uint8),
                        starts=np.cumsum([0, *sizes]), index=index,
                        facts={"rows": len(sizes), "files": [name], "faults": [], "counts": {}})


def test_b31_documents_in_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Documents of 5, 3, 4 tokens, each with its EOS: a block of 8, a last one of 7; the same for any piece size."""
    eos = tokenizer().eos_token_id
    words = {n: text for text in ("a b c", "a b", "a", "a b c d", "a b c d e", "the", "hello there", "x y z w v u")
             for n in [len(tokenizer()(text)["input_ids"])]}
    path = write_texts(tmp_path / "a.jsonl", [words[5], words[3], words[4]])
    seen = []
    for size, workers in ((1, 1), (1, 2), (4 << 20, 1)):
        monkeypatch.setenv("SHARDWISE_CACHE", str(tmp_path / f"cache-{size}-{workers}"))
        small_units(monkeypatch, size)
        train = load_data(data_of(path, task="pretrain", max_length=8, workers=workers), tokenizer()).train
        seen.append([ids.tolist() for ids, _ in train.get(range(len(train)))])
        assert train.counts["tokens_lost"] == 0 and train.counts["supervised_tokens"] == 7 + 6
    assert seen[0] == seen[1] == seen[2]
    (first, last) = seen[0]
    assert len(first) == 8 and len(last) == 7
    assert [n for n, token in enumerate(first + last) if token == eos] == [5, 9, 14]
    assert train.place(0) == f"{path}:1" and train.place(1) == f"{path}:2"
    assert [weights.tolist() for _, weights in train.get([0, 1])] == [[0.0] + [1.0] * 7, [0.0] + [1.0] * 6]


@given(sizes=st.lists(st.integers(0, 9), min_size=1, max_size=20), more=st.lists(st.integers(0, 30), min_size=1),
       length=st.integers(2, 12))
def test_b31_in_is_out_and_dropped(sizes: list[int], more: list[int], length: int) -> None:
    """Whatever the sizes; and a block's place is that of its first token's document."""
    sources = [documents(sizes), documents(more, "b")]
    made = blocks(sources, [1.0, 1.0], length)
    for number, (source, own) in enumerate(zip(sources, (sizes, more), strict=True)):
        mine = np.flatnonzero(made.source == number)
        tokens = np.concatenate([np.zeros(0, np.int32), *(ids for ids, _ in made.get(mine.tolist()))])
        whole = sum(own) - (sum(own) % length == 1)
        assert tokens.tolist() == list(range(whole))
        assert made.parts[number] == (-(-whole // length), 1.0)
        owner = np.repeat(np.arange(len(own)), own)
        for i in mine:
            first = int(made.get([int(i)])[0][0][0])
            assert made.place(int(i)) == f"{'ab'[number]}:{owner[first] + 1}" == source.place(int(owner[first]))
    assert made.counts["tokens"] + made.counts["tokens_lost"] == sum(sizes) + sum(more)
    assert made.counts["tokens_lost"] == (sum(sizes) % length == 1) + (sum(more) % length == 1)
    assert made.supervised.tolist() == [size - 1 for size in made.lengths]


def test_sources_and_weights(tmp_path: Path) -> None:
    paths = [write_rows(tmp_path / "a.jsonl", 5), write_rows(tmp_path / "b.jsonl", 3, first=5)]
    data = DataConfig(train=(SourceConfig(path=str(paths[0]), weight=2.0), SourceConfig(path=str(paths[1]))))
    train = load_data(data, tokenizer()).train
    assert train.parts == ((5, 2.0), (3, 1.0)) and len(train) == 8
    assert [train.place(n) for n in range(8)] == [f"{paths[0]}:{n}" for n in (1, 2, 3, 4, 5)] + [
        f"{paths[1]}:{n}" for n in (1, 2, 3)]
    (eight,) = train.get([7])
    assert eight[0].tolist() == opened(paths[1]).ids[-len(eight[0]):].tolist() and eight[1].dtype == np.float32
    assert train.counts["rows"] == 8 and train.counts["tokens"] == int(train.lengths.sum())
    assert train.fingerprint == load_data(data, tokenizer()).train.fingerprint
    swapped = load_data(data_of(*reversed(paths)), tokenizer()).train
    assert swapped.fingerprint != train.fingerprint


@pytest.mark.parametrize(("kind", "left_out"), [("marker_text", [2, 6]), ("empty_turn", [3]), ("duplicate", [4, 5, 6])])
def test_usable_kinds_are_dropped_by_their_flags(tmp_path: Path, kind: str, left_out: list[int]) -> None:
    """Rows 0 1 | MARKER EMPTY 1 | 0 MARKER in three sources, the second one with another weight."""
    paths = [write(tmp_path / "a.jsonl", row(0), row(1)), write(tmp_path / "b.jsonl", MARKER, EMPTY, row(1)),
             write(tmp_path / "c.jsonl", row(0), MARKER)]
    sources = tuple(SourceConfig(path=str(path), weight=w) for path, w in zip(paths, (1.0, 3.0, 1.0), strict=True))

    def loaded(**policies: Any) -> Any:
        kept = {"marker_text": "report", "empty_turn": "report", "duplicate": "report"}
        return load_data(DataConfig(train=sources, on_fault=FaultConfig(**(kept | policies))), tokenizer()).train

    whole, less = loaded(), loaded(**{kind: "drop"})
    places = [whole.place(n) for n in range(7)]
    assert whole.counts["dropped"] == {} and whole.parts == ((2, 1.0), (3, 3.0), (2, 1.0))
    kept = [n for n in range(7) if n not in left_out]
    assert [less.place(n) for n in range(len(less))] == [places[n] for n in kept]
    assert less.counts["dropped"] == {kind: len(left_out)}
    assert less.parts == tuple((sum(n in kept for n in own), weight) for own, weight in (
        ((0, 1), 1.0), ((2, 3, 4), 3.0), ((5, 6), 1.0)))
    assert less.counts["rows"] == 7 and less.counts["examples"] == len(kept)
    assert less.counts["tokens"] == int(whole.lengths[kept].sum())
    for (ids, weights), n in zip(less.get(range(len(less))), kept, strict=True):
        assert ids.tolist() == whole.get([n])[0][0].tolist() and weights.tolist() == whole.get([n])[0][1].tolist()
    assert less.fingerprint != whole.fingerprint
    with pytest.raises(DataError, match=f"{kind}.*\n.*{places[left_out[0]]}"):
        loaded(**{kind: "error"})


def test_an_answer_whose_end_is_never_trained(tmp_path: Path) -> None:
    """The kind is a template's, so all rows have it."""
    template = tmp_path / "plain.jinja"
    template.write_text("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
                        "{% if add_generation_prompt %}assistant: {% endif %}")
    path = write_rows(tmp_path / "a.jsonl", 4)
    settings = data_of(path, chat_template=str(template), on_fault=FaultConfig(terminator_untrained="report"))
    loaded = inspect(settings, tokenizer())
    assert {finding.kind: finding.count for finding in loaded.findings} == {"terminator_untrained": 4}
    assert (loaded.train.column("flags") == 1 << FLAGS.index("terminator_untrained")).all()
    dropping = data_of(path, chat_template=str(template), on_fault=FaultConfig(terminator_untrained="drop"))
    with pytest.raises(DataError, match=r"no usable example is left of 4 rows \(left out: terminator_untrained: 4\)"):
        load_data(dropping, tokenizer())


def test_an_evaluation_row_that_is_trained_on(tmp_path: Path) -> None:
    train, held_out = write_rows(tmp_path / "a.jsonl", 6), write_rows(tmp_path / "b.jsonl", 4, first=4)

    def with_policy(policy: str) -> DataConfig:
        return DataConfig(train=(SourceConfig(path=str(train)),), eval=(SourceConfig(path=str(held_out)),),
                          on_fault=FaultConfig(eval_overlap=policy))  # type: ignore[arg-type]

    with pytest.raises(DataError, match=f"eval_overlap, 2 eval rows.*\n.*{held_out}:1: also in training: {train}:5"):
        load_data(with_policy("error"), tokenizer())
    kept, less = (load_data(with_policy(policy), tokenizer()) for policy in ("report", "drop"))
    assert kept.held_out is not None and less.held_out is not None
    assert len(kept.held_out) == 4 and len(less.train) == len(kept.train) == 6
    assert [less.held_out.place(n) for n in range(2)] == [f"{held_out}:3", f"{held_out}:4"]
    assert less.held_out.counts["dropped"] == {"eval_overlap": 2} and less.held_out.parts == ((2, 1.0),)
    assert less.train.fingerprint == kept.train.fingerprint
    alone = load_held_out(with_policy("error"), tokenizer())
    assert alone is not None and len(alone) == 4


def test_faults_that_leave_nothing(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", {"messages": []}, {"messages": []})
    with pytest.raises(DataError, match=f"no_messages, 2 train rows.*\n *{path}:1"):
        load_data(data_of(path), tokenizer())
    with pytest.raises(DataError, match=r"data.train: no usable example is left of 2 rows \(left out: no_messages: 2"):
        load_data(data_of(path, on_fault=FaultConfig(no_messages="drop")), tokenizer())


def test_the_first_rows_of_each_kind_are_named_in_the_order_of_the_files(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_units(monkeypatch, 100)
    paths = [write(tmp_path / name, row(0), {"messages": []}, row(1), {"x": 1}) for name in ("a.jsonl", "b.jsonl")]
    found = inspect(data_of(*paths), tokenizer()).findings
    assert [(f.kind, f.count, [place for place, _ in f.rows]) for f in found if f.kind != "duplicate"] == [
        ("wrong_schema", 2, [f"{path}:4" for path in paths]), ("no_messages", 2, [f"{path}:2" for path in paths])]


def test_the_digest_of_a_file_is_of_all_its_bytes(tmp_path: Path) -> None:
    """Also across its pieces of 8 MiB."""
    path = tmp_path / "a.jsonl"
    path.write_bytes(bytes(9 << 20))
    (file,) = files_of(SourceConfig(path=str(path)))
    seen = {digest(file)}
    for at in (0, (8 << 20) - 1, 8 << 20, (9 << 20) - 1):
        changed = bytearray(9 << 20)
        changed[at] = 1
        path.write_bytes(changed)
        seen.add(digest(file))
    assert len(seen) == 5
