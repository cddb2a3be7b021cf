"""Which files a source means, and what their content is called."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path

import pytest

from shardwise.config.schema import SourceConfig
from shardwise.data.read.files import DataFile, digest, files_of
from shardwise.data.read.readers import plan, read
from shardwise.errors import DataError


def write(path: Path, text: str = "{}\n") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def of(path: Path | str) -> list[DataFile]:
    return files_of(SourceConfig(path=str(path)))


def refused(path: Path | str) -> str:
    with pytest.raises(DataError) as caught:
        of(path)
    return str(caught.value)


@pytest.mark.parametrize(("name", "kind", "gz"), [
    ("a.jsonl", "jsonl", False), ("a.ndjson", "jsonl", False), ("a.json", "json", False), ("a.csv", "csv", False),
    ("a.tsv", "csv", False), ("a.txt", "text", False), ("a.md", "text", False), ("a.rst", "text", False),
    ("a.parquet", "parquet", False), ("a.JSONL.GZ", "jsonl", True), ("v1.2.json.gz", "json", True),
    ("a.csv.gz", "csv", True), ("a.txt.gz", "text", True),
])
def test_a_file_by_its_suffix(tmp_path: Path, name: str, kind: str, gz: bool) -> None:
    path = write(tmp_path / name)
    assert of(path) == [DataFile(path, str(path), kind, gz)]


def test_a_path_is_shown_as_it_was_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "data" / "a.jsonl")
    monkeypatch.chdir(tmp_path)
    assert [file.shown for file in of("data/a.jsonl")] == ["data/a.jsonl"]
    assert [file.shown for file in of("data")] == ["data/a.jsonl"]
    monkeypatch.setenv("HOME", str(tmp_path))
    assert [file.path for file in of("~/data/a.jsonl")] == [tmp_path / "data" / "a.jsonl"]


def test_a_folder_is_all_its_data_files_sorted_without_hidden_ones(tmp_path: Path) -> None:
    for name in ("b.jsonl", "a.jsonl", "sub/c.csv", "sub/deep/d.txt.gz", "LICENSE", "x.png", ".hidden.jsonl",
                 ".git/e.jsonl"):
        write(tmp_path / name)
    assert [str(file.path.relative_to(tmp_path)) for file in of(tmp_path)] == [
        "a.jsonl", "b.jsonl", "sub/c.csv", "sub/deep/d.txt.gz"]


def test_a_folder_with_linked_folders_and_a_link_back_up(tmp_path: Path) -> None:
    write(tmp_path / "elsewhere" / "a.jsonl")
    (tmp_path / "data").mkdir()
    os.symlink(tmp_path / "elsewhere", tmp_path / "data" / "link")
    os.symlink(tmp_path / "data", tmp_path / "elsewhere" / "up")
    assert [str(file.path.relative_to(tmp_path)) for file in of(tmp_path / "data")] == ["data/link/a.jsonl"]


def test_globs(tmp_path: Path) -> None:
    for name in ("b.jsonl", "a.jsonl", "c.csv", "sub/d.jsonl"):
        write(tmp_path / name)
    assert [file.path.name for file in of(f"{tmp_path}/*.jsonl")] == ["a.jsonl", "b.jsonl"]
    assert [file.path.name for file in of(f"{tmp_path}/**/*.jsonl")] == ["a.jsonl", "b.jsonl", "d.jsonl"]


def test_a_file_whose_name_looks_like_a_glob(tmp_path: Path) -> None:
    path = write(tmp_path / "a[1].jsonl")
    write(tmp_path / "a1.jsonl")
    assert [file.path for file in of(path)] == [path]


def test_no_such_file_names_the_nearest(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl")
    text = refused(tmp_path / "trian.jsonl")
    assert text == (f"{tmp_path}/trian.jsonl: no such file or folder (from {Path.cwd()}); "
                    f"did you mean {tmp_path}/train.jsonl?")


def test_no_such_folder_names_the_nearest(tmp_path: Path) -> None:
    write(tmp_path / "datasets" / "train.jsonl")
    assert refused(tmp_path / "dataset" / "train.jsonl").endswith(f"did you mean {tmp_path}/datasets?")


def test_a_folder_without_data(tmp_path: Path) -> None:
    write(tmp_path / "a.png")
    assert refused(tmp_path).startswith(f"{tmp_path}: no data file in this folder; known: .jsonl .ndjson .json .csv")


def test_a_folder_with_data_that_cannot_be_unpacked(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl")
    write(tmp_path / "b.jsonl.zst")
    assert refused(tmp_path).startswith(f"{tmp_path}/b.jsonl.zst: data packed in a way that is not read here")


def test_a_glob_that_matches_nothing(tmp_path: Path) -> None:
    assert refused(f"{tmp_path}/*.jsonl").startswith(f"{tmp_path}/*.jsonl: matches no file (from ")


def test_an_unknown_suffix(tmp_path: Path) -> None:
    path = write(tmp_path / "a.arrow")
    assert refused(path) == (f"{path}: unknown kind of file '.arrow'; known: .jsonl .ndjson .json .csv .tsv .txt .md "
                             ".rst .parquet, and .gz behind all but .parquet")


def test_an_empty_path() -> None:
    assert refused("").startswith("a source has neither path nor hub")


def test_digest_is_of_the_content_alone(tmp_path: Path) -> None:
    big = os.urandom(20 << 20)  # three chunks
    (tmp_path / "a.txt").write_bytes(big)
    (tmp_path / "b.txt").write_bytes(big)
    (tmp_path / "c.txt").write_bytes(big[:-1] + bytes([big[-1] ^ 1]))
    (tmp_path / "d.txt").write_bytes(big[8 << 20:] + big[:8 << 20])
    a, b, c, d = (digest(DataFile(tmp_path / f"{name}.txt", name, "text", False)) for name in "abcd")
    assert a == b and len({a, c, d}) == 3 and len(a) == 64


def test_digest_of_an_empty_file(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", "")
    assert len(digest(DataFile(path, "a", "text", False))) == 64


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    import datasets

    monkeypatch.setenv("SHARDWISE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf")
    return tmp_path / "cache" / "hub"


def test_a_hub_data_set_is_exported_once(tmp_path: Path, cache: Path) -> None:
    rows = [{"messages": [{"role": "user", "content": f"q{n}"}, {"role": "assistant", "content": "a"}], "n": n}
            for n in range(2500)]
    write(tmp_path / "set" / "train.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    source = SourceConfig(hub=str(tmp_path / "set"))
    [file] = files_of(source)
    assert (file.kind, file.gz, file.shown) == ("parquet", False, f"{tmp_path}/set[train]")
    assert file.path.name == "rows.parquet" and file.path.parents[1] == cache
    assert [row.value for unit in plan(file) for row in read(unit)] == rows
    written = file.path.stat().st_mtime_ns
    assert files_of(source) == [file] and file.path.stat().st_mtime_ns == written
    [part] = files_of(SourceConfig(hub=str(tmp_path / "set"), split="train[:3]"))
    assert [row.value for unit in plan(part) for row in read(unit)] == rows[:3]
    assert not list(cache.rglob("*.tmp"))


def test_hub_columns_of_mixed_types_come_back_as_they_were(tmp_path: Path, cache: Path) -> None:
    rows = [{"tools": [{"name": "f", "parameters": {"a": None}}]}, {"tools": [{"name": "g", "parameters": "none"}]}]
    write(tmp_path / "set" / "train.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    [file] = files_of(SourceConfig(hub=str(tmp_path / "set")))
    assert [row.value for unit in plan(file) for row in read(unit)] == rows


def test_a_hub_data_set_that_cannot_be_loaded(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "set").mkdir()
    with pytest.raises(DataError) as caught:
        files_of(SourceConfig(hub=str(tmp_path / "set"), subset="en", split="test"))
    text = str(caught.value)
    assert text.startswith(f"hub data set '{tmp_path}/set', subset 'en', split 'test': ") and "\n" not in text
    assert text.endswith("for a folder of data files use path: in place of hub:")


def test_a_packed_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"a": 1}\n{"a": 2}\n'))
    [file] = of(path)
    assert [(row.line, row.value) for unit in plan(file) for row in read(unit)] == [(1, {"a": 1}), (2, {"a": 2})]
