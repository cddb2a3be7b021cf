"""A source as it lies in the cache: used again where it fits, never where it does not."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dist.given import TOKENIZER, write_texts
from shardwise.config.schema import DataConfig, FaultConfig, ModelConfig, SourceConfig
from shardwise.data.store import worker
from shardwise.data.store.cached import CachedSource, open_source
from shardwise.data.tokenizer import load_tokenizer
from shardwise.errors import PreflightError
from tokenised import digest, folder_of, opened, row, small_units, tokenizer, write_rows


@pytest.fixture(autouse=True)
def encoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """A cold cache, and all rows that are encoded."""
    monkeypatch.setenv("SHARDWISE_CACHE", str(tmp_path / "cache"))
    seen: list[Any] = []
    inner = worker.encoded

    def counting(values: Any, *more: Any) -> Any:
        seen.extend(values)
        return inner(values, *more)

    monkeypatch.setattr(worker, "encoded", counting)
    return seen


def tokenizer_with(folder: Path, change: Callable[[dict[str, Any], dict[str, Any]], None]) -> Any:
    """The tiny one after `change(tokenizer.json, tokenizer_config.json)`."""
    folder.mkdir()
    backend, config = (json.loads((TOKENIZER / name).read_text()) for name in
                       ("tokenizer.json", "tokenizer_config.json"))
    change(backend, config)
    (folder / "tokenizer.json").write_text(json.dumps(backend))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    for file in TOKENIZER.glob("*.jinja"):
        (folder / file.name).write_text(file.read_text())
    return load_tokenizer(ModelConfig(tokenizer=str(folder)))


def test_b59_a_second_run_encodes_nothing(tmp_path: Path, encoded: list[Any]) -> None:
    path = write_rows(tmp_path / "a.jsonl", 20)
    first = opened(path)
    assert len(encoded) == 20
    second = opened(path)
    assert len(encoded) == 20
    assert (digest(second), second.content) == (digest(first), first.content)
    assert second.place(19) == f"{path}:20"


def test_b59_what_does_not_shape_tokens_changes_nothing(tmp_path: Path, encoded: list[Any]) -> None:
    path = write_rows(tmp_path / "a.jsonl", 20)
    content = opened(path).content
    for same in (DataConfig(workers=2), DataConfig(packing=False), DataConfig(on_fault=FaultConfig(marker_text="drop")),
                 DataConfig(eval=(SourceConfig(path="x"),))):
        assert open_source(SourceConfig(path=str(path), weight=2.5), same, tokenizer()).content == content
    os.utime(path, (0, 0))
    assert opened(path).content == content
    assert len(encoded) == 20


def test_b59_what_shapes_tokens_makes_new_ones(tmp_path: Path, encoded: list[Any]) -> None:
    path = write_rows(tmp_path / "a.jsonl", 20)
    template = tmp_path / "own.jinja"
    template.write_text(tokenizer().chat_template)
    base = opened(path, chat_template=str(template))
    template.write_text(tokenizer().chat_template.replace("<|im_start|>", "Now<|im_start|>", 1))
    changed = opened(path, chat_template=str(template))
    assert digest(changed) != digest(base) and len(encoded) == 40

    shorter = opened(path, max_length=30, on_too_long="drop")
    assert 0 < len(shorter.index["line"]) < 20 and max(shorter.index["length"]) <= 30
    cut = opened(path, max_length=30, on_too_long="truncate")
    assert len(cut.index["line"]) == 20 and cut.index["length"].max() == 30
    user = opened(path, supervise=("user",))
    assert user.ids.tolist() == opened(path).ids.tolist() and user.weights.tolist() != opened(path).weights.tolist()
    assert opened(path).content == base.content  # the tokenizer's own template says the same
    sources = [base, changed, shorter, cut, user, opened(path, limit=7)]
    assert len({source.content for source in sources}) == 6
    assert len(encoded) == 5 * 20 + 7


def test_b59_another_byte_of_the_same_size_and_time(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.jsonl", 20)
    before, stat = opened(path), path.stat()
    text = path.read_text()
    path.write_text(text.replace("word0 of 8", "word0 of 9"))
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (stat.st_size, stat.st_mtime_ns)
    after = opened(path)
    assert after.content != before.content
    differing = np.flatnonzero(np.asarray(before.ids) != np.asarray(after.ids))
    assert len(differing) == 1 and before.starts[8] < differing[0] < before.starts[9]  # row 8, and only there


def test_b59_another_tokenizer(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.jsonl", 20)
    source, data = SourceConfig(path=str(path)), DataConfig()

    def swapped(backend: dict[str, Any], config: dict[str, Any]) -> None:
        vocab = backend["model"]["vocab"]
        vocab["w"], vocab["o"] = vocab["o"], vocab["w"]

    def other_pad(backend: dict[str, Any], config: dict[str, Any]) -> None:
        config["pad_token"] = "<|im_end|>" if config.get("pad_token") != "<|im_end|>" else "<|im_start|>"

    base = open_source(source, data, tokenizer_with(tmp_path / "same", lambda backend, config: None))
    assert base.content == opened(path).content  # where it lies does not matter
    vocabulary = open_source(source, data, tokenizer_with(tmp_path / "vocabulary", swapped))
    special = open_source(source, data, tokenizer_with(tmp_path / "special", other_pad))
    assert len({base.content, vocabulary.content, special.content}) == 3
    assert digest(vocabulary) != digest(base)


def test_a_tokenizer_that_pads_and_truncates_is_the_same_one_before_and_after_use(
        tmp_path: Path, encoded: list[Any]) -> None:
    """Encoders turn both off in the tokenizer itself: the second source of a cold start would get another key."""

    def limits(backend: dict[str, Any], config: dict[str, Any]) -> None:
        backend["truncation"] = {"direction": "Right", "max_length": 8, "strategy": "LongestFirst", "stride": 0}
        backend["padding"] = {"strategy": {"Fixed": 64}, "direction": "Right", "pad_to_multiple_of": None,
                              "pad_id": 0, "pad_type_id": 0, "pad_token": "x"}

    limited = tokenizer_with(tmp_path / "limited", limits)
    paths = [write_rows(tmp_path / name, 10, first) for name, first in (("a.jsonl", 0), ("b.jsonl", 10))]
    cold = [open_source(SourceConfig(path=str(path)), DataConfig(), limited) for path in paths]
    assert len(encoded) == 20
    again = load_tokenizer(ModelConfig(tokenizer=str(tmp_path / "limited")))  # a new process, with nothing to do
    warm = [open_source(SourceConfig(path=str(path)), DataConfig(), again) for path in paths]
    assert [source.content for source in warm] == [source.content for source in cold]
    assert len(encoded) == 20
    assert digest(cold[0]) == digest(opened(paths[0]))  # and neither limit applied
    texts = write_texts(tmp_path / "texts.jsonl", ["some words " * 30])
    text = open_source(SourceConfig(path=str(texts)), DataConfig(task="pretrain"),
                       load_tokenizer(ModelConfig(tokenizer=str(tmp_path / "limited"))))
    assert text.ids.tolist() == opened(texts, task="pretrain").ids.tolist() and len(text.ids) > 64


def test_rows_under_another_name_have_the_same_content_and_fresh_addresses(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.jsonl", 3)
    before = opened(path)
    after = opened(path.rename(tmp_path / "b.jsonl"))
    assert after.content == before.content
    assert [after.place(n) for n in range(3)] == [f"{tmp_path}/b.jsonl:{n}" for n in (1, 2, 3)]


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("limit", [1, 3, 7, 10, 12, 24, 99])
def test_limit_is_the_first_rows_across_pieces_and_files(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, encoded: list[Any], limit: int, workers: int) -> None:
    """Faulty rows count among them."""
    small_units(monkeypatch, 300)
    folder = tmp_path / "rows"
    folder.mkdir()
    (folder / "a.jsonl").write_text("".join(
        json.dumps(row(n)) + "\n" if n != 2 else "{\n" for n in range(10)))
    write_rows(folder / "b.jsonl", 14, first=10)
    source = opened(folder, limit=limit, workers=workers)
    numbers = [n for n in range(min(limit, 24)) if n != 2]
    assert source.facts["rows"] == min(limit, 24) == len(encoded)
    assert source.facts["counts"] == ({} if limit < 3 else {"broken_json": 1})
    assert [source.place(n) for n in range(len(source.index["line"]))] == [
        f"{folder}/a.jsonl:{n + 1}" if n < 10 else f"{folder}/b.jsonl:{n - 9}" for n in numbers]


def test_opening_reads_no_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_rows(tmp_path / "a.jsonl", 20)
    opened(path)
    monkeypatch.setattr(np, "fromfile", None)
    source: CachedSource = opened(path)
    assert isinstance(source.ids, np.memmap) and isinstance(source.weights, np.memmap)
    assert not source.ids.flags.writeable and not source.weights.flags.writeable


@pytest.mark.parametrize(("name", "size"), [("facts.json", 0), ("facts.json", 20), ("index.npz", 0),
                                            ("index.npz", 900), ("ids", 0), ("ids", 400), ("weights", 99)])
def test_a_damaged_cache_is_said_in_words(tmp_path: Path, name: str, size: int) -> None:
    """A machine went down: files are there, but not all of their bytes."""
    path = write_rows(tmp_path / "a.jsonl", 20)
    opened(path)
    folder = folder_of(tmp_path / "cache")
    os.truncate(folder / name, size)
    with pytest.raises(PreflightError, match=f"{folder}: tokenised data is damaged there .* remove that folder"):
        opened(path)
    shutil.rmtree(folder)
    assert len(opened(path).index["line"]) == 20
