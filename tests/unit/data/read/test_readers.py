"""Every kind of file as rows, and every kind of damage as a fault that hides no other row."""

from __future__ import annotations

import gzip
import json
import tempfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from shardwise.data.faults import RowFault
from shardwise.data.read import jsontext
from shardwise.data.read.files import KINDS, DataFile
from shardwise.data.read.readers import plan, read
from shardwise.errors import DataError

Row = tuple[int, Any]


def rows_of(path: Path, bytes_per_unit: int = 4 << 20) -> list[Row]:
    """(line, object) of each row, with the kind in place of the object of a fault."""
    return [(line, value.kind if isinstance(value, RowFault) else value)
            for line, value in read_all(path, bytes_per_unit)]


def read_all(path: Path, bytes_per_unit: int = 4 << 20) -> list[Row]:
    gz = path.suffix == ".gz"
    file = DataFile(path, path.name, KINDS[path.with_suffix("").suffix if gz else path.suffix], gz)
    return [(row.line, row.value) for unit in plan(file, bytes_per_unit=bytes_per_unit) for row in read(unit)]


def given_file(folder: Path, name: str, content: bytes | str) -> Path:
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


@pytest.fixture
def lines(tmp_path: Path) -> Any:
    return lambda content: rows_of(given_file(tmp_path, "a.jsonl", content))


@pytest.fixture
def text_of_fault(tmp_path: Path) -> Any:
    def text(content: bytes | str, name: str = "a.jsonl") -> str:
        faults = [value for _, value in read_all(given_file(tmp_path, name, content)) if isinstance(value, RowFault)]
        assert len(faults) == 1
        return str(faults[0])
    return text


GOOD = {"a": 1}


@pytest.mark.parametrize(("content", "want"), [
    (b"", []),
    (b" \n\r\n\n", []),
    (b'\xef\xbb\xbf{"a": 1}\n', [(1, GOOD)]),
    (b'{"a": 1}', [(1, GOOD)]),
    (b'\n{"a": 1}\n\n  \n{"a": 1}\n\n', [(2, GOOD), (5, GOOD)]),
    (b'{"a": 1}\r\n{"a": 1}\r\n', [(1, GOOD), (2, GOOD)]),
    ('{"a": "\u2028\u0085\x7f"}\n{"a": 1}\n', [(1, {"a": "\u2028\u0085\x7f"}), (2, GOOD)]),
    (b'{"a": 1}\r{"a": 1}\n{"a": 1}\n', [(1, "broken_json"), (2, GOOD)]),
    (b'{"a":\r1}\n', [(1, GOOD)]),
    (b'{"a": 2, "a": 1}\n', [(1, GOOD)]),
    (b'{"a": 1}\n{"a": \n{"a": 1}\n', [(1, GOOD), (2, "broken_json"), (3, GOOD)]),
    (b'{"a": 1} {"a": 1}\n{"a": 1}\n', [(1, "broken_json"), (2, GOOD)]),
    (b'{"a": "tab\there"}\n{"a": 1}\n', [(1, "broken_json"), (2, GOOD)]),
    (b'{"a": 1}\n{"a": "\xff"}\n{"a": 1}\n', [(1, GOOD), (2, "bad_utf8"), (3, GOOD)]),
    (b'{"a": "\\ud83d\\ude00"}\n', [(1, {"a": "\U0001f600"})]),
    (b'{"a": "\\\\ud83d"}\n', [(1, {"a": "\\ud83d"})]),
    (b'{"a": [{"b": "x\\ud83d"}]}\n{"a": 1}\n', [(1, "bad_utf8"), (2, GOOD)]),
    (b'{"\\uDE00": 1}\n{"a": 1}\n', [(1, "bad_utf8"), (2, GOOD)]),
    (b'{"a": NaN}\n{"a": Infinity}\n{"a": -Infinity}\n{"a": 1}\n',
     [(1, "broken_json"), (2, "broken_json"), (3, "broken_json"), (4, GOOD)]),
    (b'{"a": ' + b"9" * 5000 + b'}\n{"a": 1}\n', [(1, "broken_json"), (2, GOOD)]),
    (b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b'}\n{"a": 1}\n', [(1, "broken_json"), (2, GOOD)]),
    (b'{"a": ' + b"[" * 300 + b"]" * 300 + b'}\n{"a": 1}\n', [(1, "broken_json"), (2, GOOD)]),
    (b'{"a": ' + b"[" * 100 + b"]" * 100 + b'}\n', [(1, {"a": eval("[" * 100 + "]" * 100)})]),
    (b'[1]\n"x"\n3\nnull\ntrue\n{"a": 1}\n', [*((n, "broken_json") for n in range(1, 6)), (6, GOOD)]),
    ('{"a": 1}\n'.encode("utf-16"), [(1, "bad_utf8"), (2, "broken_json")]),
], ids=lambda value: repr(value)[:40] if isinstance(value, (bytes, str)) else "")
def test_json_lines(content: bytes | str, want: list[Row], lines: Any) -> None:
    assert lines(content) == want


@pytest.mark.parametrize(("content", "text"), [
    (b'{"a": 1, "b"', "not valid JSON: Expecting ':' delimiter at character 13, near \"{\\\"a\\\": 1, \\\"b\\\"\" "
                      "(the last line, without a line end: was the file cut off?)"),
    (b'{"a": 1, }\n', "not valid JSON: Expecting property name enclosed in double quotes at character 10, "
                      "near \"{\\\"a\\\": 1, }\""),
    (b'["0123456789012345678901234567890123456789"]\n',
     'a row is a JSON object, not an array: ["01234567890123456789012345678901234567'),
    (b'3\n', "a row is a JSON object, not a number: 3"),
    (b'{"a": "\xff"}\n', "byte 8 (0xff) is not UTF-8"),
    (b'{"a": [0, {"b": "xy\\ud83d"}]}\n',
     "a[1].b: character 3 is half a surrogate pair (\\ud83d), which is not text"),
    (b'{"a": {"x\\ude00": 1}}\n',
     "a key of a: character 2 is half a surrogate pair (\\ude00), which is not text"),
    (b'{"a": NaN}\n', "not usable JSON: NaN is not a JSON number"),
    (b'{"a": ' + b"9" * 5000 + b'}\n',
     "not usable JSON: Exceeds the limit (4300 digits) for integer string conversion: value has 5000 digits"),
    (b'{"a": ' + b"[" * 5000 + b"]" * 5000 + b'}\n', "not usable JSON: nested too deeply"),
    (b'{"a": ' + b"[" * 300 + b"]" * 300 + b'}\n', "not usable JSON: nested more than 200 deep"),
], ids=range(11))
def test_what_a_fault_says(content: bytes, text: str, text_of_fault: Any) -> None:
    assert text_of_fault(content) == text


def test_rows_around_the_longest(lines: Any) -> None:
    def row(size: int) -> bytes:
        return b'{"a": "' + b"x" * (size - 9) + b'"}'
    longest = jsontext.LONGEST
    got = lines(row(longest) + b"\r\n" + row(longest + 1) + b"\n" + row(longest * 2) + b'\n{"a": 1}\n'
                + row(longest + 1))
    assert [line for line, _ in got] == [1, 2, 3, 4, 5]
    assert len(got[0][1]["a"]) == longest - 9
    assert [value for _, value in got[1:]] == ["oversized_row", "oversized_row", GOOD, "oversized_row"]


@pytest.mark.parametrize(("content", "want"), [
    ("", []),
    (" \n ", []),
    ("[]", []),
    ("[ \n ]\n", []),
    ('[{"a": 1}]', [(1, GOOD)]),
    ('\ufeff\n[{"a": 1}]', [(2, GOOD)]),
    ('[\n  {\n    "a": 1\n  },\n  {"a": "]}\\"[{"}\n]\n', [(2, GOOD), (5, {"a": ']}"[{'})]),
    ('{\n "a":\n1}', [(1, GOOD)]),
    ('\n\n{"a": 1}\n', [(3, GOOD)]),
    ('{"data": [{"a": 1}]}', [(1, {"data": [GOOD]})]),
    ('{"a": 1}\n{"a": 1}\n', [(1, GOOD), (2, GOOD)]),  # JSON lines under the wrong name
    ('{"a": 1}\nbroken\n{"a": 1}', [(1, GOOD), (2, "broken_json"), (3, GOOD)]),
    ('{"a": \n{"a": 1}\n{"a": 1}\n', [(1, "broken_json"), (2, GOOD), (3, GOOD)]),
    ('{"a": [\n{"b": 1}\n]}', [(1, {"a": [{"b": 1}]})]),
    ('"x"', [(1, "broken_json")]),
    ('[3, {"a": 1},\n "x, y", null,\n{"a": 1}, [1]]', [(1, "broken_json"), (1, GOOD), (2, "broken_json"),
                                                  (2, "broken_json"), (3, GOOD), (3, "broken_json")]),
    ('[{"a": NaN}, {"a": "\\ud83d"}, {"a": 1}]', [(1, "broken_json"), (1, "bad_utf8"), (1, GOOD)]),
    (b'[{"a": "\xff"},\n{"a": 1}]', [(1, "bad_utf8"), (2, GOOD)]),
    ('[{"a": 1},\n{"b"\n\n1},\n{"a": 1}]', [(1, GOOD), (4, "broken_json"), (5, GOOD)]),  # damage in one element
    ('[{"a": 1},\n{"a": 1', [(1, GOOD), (2, "broken_json")]),  # cut off
    ('[{"a": 1},\n{"a": "x', [(1, GOOD), (2, "broken_json")]),
    ('[{"a": 1},\n{"a": 1}', [(1, GOOD), (2, GOOD), (2, "broken_json")]),
    ('[{"a": 1},\n', [(1, GOOD), (2, "broken_json")]),
    ('[{"a": 1},\n{"b": [1},\n{"a": 1}]', [(1, GOOD), (2, "broken_json")]),  # a missing bracket
    ('[{"a": 1},\n{"b": "x},\n{"c": "y"}]', [(1, GOOD), (2, "broken_json")]),  # a missing quote
    ('[{"a": 1}\n{"a": 1}]', [(1, GOOD), (2, "broken_json")]),  # a missing comma
    ('[{"a": 1}, ]', [(1, GOOD), (1, "broken_json")]),
    ('[{"a": 1}}, {"a": 1}]', [(1, GOOD), (1, "broken_json")]),
    ('[{"a": 1}]\n{"a": 1}', [(1, GOOD), (2, "broken_json")]),
], ids=lambda value: repr(value)[:40] if isinstance(value, (bytes, str)) else "")
def test_json_files(content: bytes | str, want: list[Row], tmp_path: Path) -> None:
    path = given_file(tmp_path, "a.json", content)
    assert rows_of(path) == want
    assert rows_of(path, 1) == want
    packed = given_file(tmp_path, "a.json.gz", gzip.compress(path.read_bytes()))
    assert rows_of(packed) == want


def test_an_element_that_is_too_long_hides_no_other(tmp_path: Path) -> None:
    long = '{"a": "' + "x\\n" * 6_000_000 + '\n"}'
    path = given_file(tmp_path, "a.json", f'[{{"a": 1}},\n{long},\n{{"a": 1}}]')
    want = [(1, GOOD), (2, "oversized_row"), (4, GOOD)]
    assert rows_of(path) == want
    assert rows_of(path, 1) == want


def test_an_element_of_more_strings_than_are_taken_at_once(tmp_path: Path) -> None:
    rows = [{"a": ["[x", "\\"] * 5000}, GOOD]
    assert rows_of(given_file(tmp_path, "a.json", json.dumps(rows))) == [(1, rows[0]), (1, GOOD)]


def test_one_object_that_is_too_long(tmp_path: Path) -> None:
    assert rows_of(given_file(tmp_path, "a.json", '{\n"a": "' + "x" * (17 << 20) + '"}')) == [(1, "oversized_row")]


@pytest.mark.parametrize(("content", "want"), [
    ("", []),
    ("a,b\n", []),
    ("a,b\n1,2\n", [(2, {"a": "1", "b": "2"})]),
    ("\ufeffa,b\r\n1,2\r\n\r\n3,4", [(2, {"a": "1", "b": "2"}), (4, {"a": "3", "b": "4"})]),
    ('a,b\n"x\n\r\n\u2028 ""y"", z",2\n3,4\n',
     [(2, {"a": 'x\n\r\n\u2028 "y", z', "b": "2"}), (5, {"a": "3", "b": "4"})]),
    ('a,b\n5" pipe,2\n', [(2, {"a": '5" pipe', "b": "2"})]),
    ("a,b\n1\n1,2,3\n3,4\n", [(2, "broken_json"), (3, "broken_json"), (4, {"a": "3", "b": "4"})]),
    ('a,b\n"x" y,2\n3,4\n', [(2, "broken_json"), (3, {"a": "3", "b": "4"})]),
    ('a,b\n"x,2\n3,4\n5,6\n', [(2, "broken_json"), (3, {"a": "3", "b": "4"}), (4, {"a": "5", "b": "6"})]),
    ('a,b\n"x,2\n3,4\n"5",6\n', [(2, "broken_json"), (3, {"a": "3", "b": "4"}), (4, {"a": "5", "b": "6"})]),
    (b"a,b\n\xff,2\n3,4\n", [(2, "bad_utf8"), (3, {"a": "3", "b": "4"})]),
    ("a,a\n1,2\n", [(1, "broken_json")]),
    (b"\xff\n1\n", [(1, "bad_utf8")]),
    ('"a\n', [(1, "broken_json")]),
], ids=lambda value: repr(value)[:40] if isinstance(value, (bytes, str)) else "")
def test_csv(content: bytes | str, want: list[Row], tmp_path: Path) -> None:
    assert rows_of(given_file(tmp_path, "a.csv", content)) == want


@pytest.mark.parametrize(("content", "text"), [
    ("a,b\n1,2,3\n", "3 cells where the header has 2 names"),
    ("a,b,a\n", "the header names column 'a' twice, so no row can be read"),
    ("a,b\n1,\"x\n", "not a valid CSV record: unexpected end of data"),
    (b"a,b\n1,xy\xff\n", "b: after 2 characters, byte 0xff is not UTF-8"),
], ids=range(4))
def test_what_a_csv_fault_says(content: bytes | str, text: str, text_of_fault: Any) -> None:
    assert text_of_fault(content, "a.csv") == text


def test_tsv(tmp_path: Path) -> None:
    want = [(2, {"a": "x,y", "b": "2"})]
    assert rows_of(given_file(tmp_path, "a.tsv", "a\tb\nx,y\t2\n")) == want
    assert rows_of(given_file(tmp_path, "a.tsv.gz", gzip.compress(b"a\tb\nx,y\t2\n"))) == want


def test_long_csv_records(tmp_path: Path) -> None:
    big = "x" * (1 << 20)
    content = f"a,b\n{big},2\n{big * 17},2\n3,4\n" + f'"{big}\n' * 17 + "5,6\n"
    got = rows_of(given_file(tmp_path, "a.csv", content))
    assert got[0] == (2, {"a": big, "b": "2"})
    assert got[1:3] == [(3, "oversized_row"), (4, {"a": "3", "b": "4"})]
    assert got[-1] == (22, {"a": "5", "b": "6"})


@pytest.mark.parametrize(("content", "want"), [
    (b"", []),
    (b" ", [(1, {"text": " "})]),
    (b"\xef\xbb\xbfone\r\ntwo\n", [(1, {"text": "one\r\ntwo\n"})]),
    (b"one\xff", [(1, "bad_utf8")]),
    (b"x" * (16 << 20), [(1, {"text": "x" * (16 << 20)})]),
    (b"x" * ((16 << 20) + 1), [(1, "oversized_row")]),
], ids=range(6))
def test_text(content: bytes, want: list[Row], tmp_path: Path) -> None:
    got = rows_of(given_file(tmp_path, "a.md", content))
    assert got == want


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.json.gz", "a.csv.gz"])
def test_a_damaged_gz_keeps_what_came_before(name: str, tmp_path: Path) -> None:
    content = {"a.jsonl.gz": b'{"a": "1"}\n' * 50_000, "a.csv.gz": b"a\n" + b"1\n" * 50_000,
               "a.json.gz": b"[" + b'{"a": "1"},\n' * 50_000 + b"{}]"}[name]
    packed = gzip.compress(content, compresslevel=0)
    got = rows_of(given_file(tmp_path, name, packed[:len(packed) // 2]))
    assert len(got) > 20_000 and got[100][1] == {"a": "1"}
    assert {value for _, value in got[-1:]} == {"broken_json"}
    assert rows_of(given_file(tmp_path, name, b"not packed at all")) == [(1, "broken_json")]


def write_parquet(path: Path, table: pa.Table, **how: Any) -> Path:
    pq.write_table(table, path, **how)
    return path


def test_parquet_keeps_the_columns_and_drops_what_arrow_filled_in(tmp_path: Path) -> None:
    rows = [{"m": [{"role": "user", "calls": None}, {"role": "a", "calls": [{"f": {"x": 1}}]}], "s": None, "n": 1},
            {"m": [{"role": "user", "calls": [{"f": {"y": [None, 2]}}]}], "s": {"z": "t"}, "n": None},
            {"m": None, "s": None, "n": 3}]
    got = rows_of(write_parquet(tmp_path / "a.parquet", pa.Table.from_pylist(rows)))
    assert got == [
        (1, {"m": [{"role": "user"}, {"role": "a", "calls": [{"f": {"x": 1}}]}], "s": None, "n": 1}),
        (2, {"m": [{"role": "user", "calls": [{"f": {"y": [None, 2]}}]}], "s": {"z": "t"}, "n": None}),
        (3, {"m": None, "s": None, "n": 3})]


def test_parquet_maps_fixed_lists_and_json(tmp_path: Path) -> None:
    struct = pa.struct([("a", pa.int64()), ("b", pa.int64())])
    table = pa.table({
        "map": pa.array([[("k", {"a": 1, "b": None})], None, []], pa.map_(pa.string(), struct)),
        "pair": pa.array([[{"a": 1}, {"b": 2}], None, [None, {"a": 3}]], pa.list_(struct, 2)),
        "json": pa.ExtensionArray.from_storage(pa.json_(), pa.array(['{"x": null}', None, "[1"])),
    })
    got = rows_of(write_parquet(tmp_path / "a.parquet", table))
    assert got == [(1, {"map": {"k": {"a": 1}}, "pair": [{"a": 1}, {"b": 2}], "json": {"x": None}}),
                   (2, {"map": None, "pair": None, "json": None}), (3, "broken_json")]


def test_parquet_faults_of_single_rows(tmp_path: Path) -> None:
    texts = pa.array([b"one", b"tw\xffo", b"three"]).view(pa.string())
    assert rows_of(write_parquet(tmp_path / "a.parquet", pa.table({"t": texts}))) == [
        (1, {"t": "one"}), (2, "bad_utf8"), (3, {"t": "three"})]
    large = pa.table({"t": ["one", "x" * (17 << 20), "three"]})
    assert rows_of(write_parquet(tmp_path / "b.parquet", large)) == [
        (1, {"t": "one"}), (2, "oversized_row"), (3, {"t": "three"})]


def test_parquet_without_rows(tmp_path: Path) -> None:
    assert rows_of(write_parquet(tmp_path / "a.parquet", pa.table({"t": pa.array([], pa.string())}))) == []


def test_a_file_that_is_no_parquet(tmp_path: Path) -> None:
    for content in (b"", b"PAR1 and more", b"x" * 100):
        with pytest.raises(DataError, match=r"^a\.parquet: not a parquet file that can be read: "):
            read_all(given_file(tmp_path, "a.parquet", content))


def test_a_parquet_file_with_damaged_pages(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", pa.table({"t": [f"row {n}" for n in range(5000)]}),
                         compression="zstd")
    content = bytearray(path.read_bytes())
    content[40:4000] = b"\xff" * 3960
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"^a\.parquet: damaged near row 1: "):
        read_all(path)


TOKENS = st.lists(st.sampled_from([b"{", b"}", b"[", b"]", b'"', b",", b"\n", b"\r", b":", b"\\", b"1", b"a", b"\xff",
                                   b"\xef\xbb\xbf", b'{"a": 1}', b'"\\ud800"', b"NaN", b"\x00", b" "]), max_size=40)


@settings(max_examples=400)
@given(st.one_of(st.binary(max_size=80), TOKENS.map(b"".join)),
       st.sampled_from(["a.jsonl", "a.json", "a.csv", "a.txt"]), st.integers(1, 50))
@example(b'["\\', "a.json", 1)
@example(b'[{"a": 1}, 12{"a": 1}]', "a.json", 1)
def test_any_bytes_give_rows_or_faults(content: bytes, name: str, bytes_per_unit: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for line, value in read_all(given_file(Path(folder), name, content), bytes_per_unit):
            assert 1 <= line <= content.count(b"\n") + 1
            assert isinstance(value, (dict, RowFault))
            assert isinstance(value, RowFault) or json.dumps(value).isascii()
