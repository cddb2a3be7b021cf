"""However a file is cut, its pieces together are the file."""

from __future__ import annotations

import json
import pickle
import tempfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.data.faults import RowFault
from shardwise.data.read.files import DataFile
from shardwise.data.read.readers import Unit, plan, read
from shardwise.data.rows import Read

LINES = st.lists(st.sampled_from([
    b'{"a": 1}', b"", b"  ", b'{"a": "\xe2\x80\xa8"}', b'{"a": "x\\ny"}', b"broken", b'{"a": "\xff"}', b"\r", b"[1]",
    b'{"b": "' + b"long" * 20 + b'"}',
]), max_size=30)
ELEMENTS = st.lists(st.sampled_from([
    '{"a": 1}', '{"a": "],[{\\"}"}', '{\n"a":\n[1, {"b": "\u2028"}]\n}', "{}", "3", '"a, b"', '{"a": NaN}', '{"a" 1}',
]), max_size=12)
GAPS = st.lists(st.sampled_from([",", ", ", "\n,\n", ",\r\n  "]), min_size=12, max_size=12)


def comparable(rows: list[Read]) -> list[tuple[int, Any]]:
    return [(row.line, (row.value.kind, row.value.text) if isinstance(row.value, RowFault) else row.value)
            for row in rows]


def whole_and_cut(name: str, content: bytes, bytes_per_unit: int) -> tuple[list[Any], list[Any], list[Unit]]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / name
        path.write_bytes(content)
        file = DataFile(path, name, name.rpartition(".")[2], False)
        whole = [row for unit in plan(file, bytes_per_unit=1 << 30) for row in read(unit)]
        units = [pickle.loads(pickle.dumps(unit)) for unit in plan(file, bytes_per_unit=bytes_per_unit)]
        return comparable(whole), comparable([row for unit in units for row in read(unit)]), units


@settings(max_examples=150)
@given(LINES, st.integers(1, 120), st.booleans(), st.sampled_from([b"\n", b"\r\n"]))
def test_json_lines(lines: list[bytes], bytes_per_unit: int, ended: bool, end: bytes) -> None:
    content = end.join(lines) + (end if ended else b"")
    whole, cut, units = whole_and_cut("a.jsonl", content, bytes_per_unit)
    assert cut == whole
    assert [unit.start for unit in units] == [0, *(unit.stop for unit in units)][:len(units)]
    assert [line for line, _ in whole] == [number for number, line in enumerate(content.split(b"\n"), start=1)
                                           if line.strip(b" \t\r\n")]


@settings(max_examples=150)
@given(ELEMENTS, GAPS, st.integers(1, 60))
def test_json_arrays(elements: list[str], gaps: list[str], bytes_per_unit: int) -> None:
    content = "[" + "".join(a + b for a, b in zip(elements, [*gaps[:max(len(elements) - 1, 0)], "\n"],
                                                  strict=False)) + "]"
    whole, cut, _ = whole_and_cut("a.json", content.encode(), bytes_per_unit)
    assert cut == whole
    assert len(whole) == len(elements)
    rows = [value for _, value in whole if isinstance(value, dict)]
    assert rows == [json.loads(e) for e in elements if e.startswith("{") and "NaN" not in e and e != '{"a" 1}']


@settings(max_examples=50)
@given(st.text(alphabet='[]{}",:\\ \n1a', max_size=60), st.integers(1, 20))
def test_damaged_json_files(text: str, bytes_per_unit: int) -> None:
    whole, cut, _ = whole_and_cut("a.json", text.encode(), bytes_per_unit)
    assert cut == whole


def test_units_are_about_the_size_asked_for(tmp_path: Path) -> None:
    content = b"".join(b'{"a": %d}\n' % n for n in range(1000))
    _, _, units = whole_and_cut("a.jsonl", content, 1000)
    assert all(1000 <= unit.stop - unit.start < 1020 for unit in units[:-1])
    assert units[-1].stop == len(content)


@pytest.mark.parametrize("row_group_size", [1, 7, 1000])
@pytest.mark.parametrize("bytes_per_unit", [1, 300, 1 << 30])
def test_parquet(tmp_path: Path, row_group_size: int, bytes_per_unit: int) -> None:
    rows = [{"text": f"row {n}" * (n % 5)} for n in range(600)]
    path = tmp_path / "a.parquet"
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=row_group_size)
    units = plan(DataFile(path, "a", "parquet", False), bytes_per_unit=bytes_per_unit)
    assert comparable([row for unit in units for row in read(unit)]) == list(enumerate(rows, start=1))
    assert [unit.start for unit in units] == [0, *(unit.stop for unit in units)][:-1]
    assert all(unit.first_line == unit.start + 1 for unit in units)
    if bytes_per_unit == 1:
        assert len(units) == (600 if row_group_size < 8 else 8)
    if bytes_per_unit == 1 << 30:
        assert len(units) == 1
