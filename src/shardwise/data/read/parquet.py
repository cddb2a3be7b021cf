"""Rows of a .parquet file."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import pyarrow.parquet as pq

from shardwise.data.faults import RowFault
from shardwise.data.read import jsontext
from shardwise.data.rows import Read
from shardwise.errors import DataError

_ROWS_AT_ONCE, _BYTES_AT_ONCE = 256, 8 << 20
_PARTS_OF_A_GROUP = 8  # a row group is decoded from its start: more parts would decode it over and over


def ranges(path: Path, name: str, bytes_per_range: int) -> Iterator[tuple[int, int]]:
    """[start, stop) rows: several small row groups together, a large one in up to eight parts."""
    with _opened(path, name) as file:
        groups = [file.metadata.row_group(i) for i in range(file.metadata.num_row_groups)]
    begin = at = size = 0
    for group in groups:
        parts = max(1, min(_PARTS_OF_A_GROUP, group.total_byte_size // bytes_per_range, group.num_rows))
        if parts > 1 and at > begin:
            yield begin, at
            begin = at
        for part in range(1, parts):
            stop = at + group.num_rows * part // parts
            yield begin, stop
            begin = stop
        at += group.num_rows
        size = group.total_byte_size + (size if parts == 1 else 0)
        if size >= bytes_per_range and at > begin:
            yield begin, at
            begin, size = at, 0
    if at > begin:
        yield begin, at


def read(path: Path, name: str, start: int, stop: int) -> Iterator[Read]:
    """Rows [start, stop), their lines counted from 1. Raises DataError for a file that cannot be read."""
    with _opened(path, name) as file:
        groups, before, size = [], 0, 0
        at = 0
        for number in range(file.metadata.num_row_groups):
            group = file.metadata.row_group(number)
            if at + group.num_rows <= start:
                before = at + group.num_rows
            elif at < stop:
                groups.append(number)
                size += group.total_byte_size
            at += group.num_rows
        if not groups:
            return
        rows = max(1, min(_ROWS_AT_ONCE, _BYTES_AT_ONCE * (stop - before) // max(size, 1)))
        try:
            for batch in file.iter_batches(batch_size=rows, row_groups=groups):
                low, high = max(start - before, 0), min(stop - before, batch.num_rows)
                if low < high:
                    yield from _rows(batch.slice(low, high - low), before + low + 1)
                before += batch.num_rows
                if before >= stop:
                    return
        except (pa.ArrowException, OSError) as error:
            raise DataError(f"{name}: damaged near row {before + 1}: {_line(error)}") from None


def _opened(path: Path, name: str) -> Any:
    try:
        return pq.ParquetFile(path, pre_buffer=False, buffer_size=1 << 20)  # pages as needed, not whole columns
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{name}: not a parquet file that can be read: {_line(error)}") from None


def _line(error: Exception) -> str:
    return jsontext.printable(" ".join(str(error).split()), 200)


def _rows(batch: Any, line: int) -> Iterator[Read]:
    rows: list[dict[str, Any]] | None = None
    if batch.nbytes <= jsontext.LONGEST:
        try:
            rows = _objects(batch)
        except (UnicodeDecodeError, RowFault):
            rows = None  # some row of it: find out which
    for index in range(batch.num_rows):
        try:
            yield Read(line + index, rows[index] if rows is not None else _one(batch.slice(index, 1)))
        except RowFault as fault:
            yield Read(line + index, fault)


def _one(row: Any) -> dict[str, Any]:
    if row.nbytes > jsontext.LONGEST:
        raise RowFault("oversized_row", jsontext.TOO_LONG)
    try:
        return _objects(row)[0]
    except UnicodeDecodeError as error:
        raise RowFault("bad_utf8", f"byte {error.start + 1} ({error.object[error.start]:#04x}) of a text "
                                   "is not UTF-8") from None


def _objects(batch: Any) -> list[dict[str, Any]]:
    columns = [_values(column) for column in batch.columns]
    names = batch.schema.names
    return [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)] if columns else []


def _values(array: Any) -> list[Any]:
    """An Arrow array as Python values, column by column, which is several times faster than value by value."""
    kind = array.type
    if pa.types.is_fixed_size_list(kind):
        array, kind = array.cast(pa.list_(kind.value_type)), pa.list_(kind.value_type)
    if isinstance(kind, pa.JsonType):
        return [None if text is None else jsontext.value_of(text) for text in array.storage.to_pylist()]
    if pa.types.is_struct(kind):
        return _where_valid(array, _structs(array))
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return _where_valid(array, _lists(array, array.values))
    if pa.types.is_map(kind):
        keys, items = _lists(array, array.keys), _lists(array, array.items)
        return _where_valid(array, [dict(zip(*pair, strict=True)) for pair in zip(keys, items, strict=True)])
    return cast(list[Any], array.to_pylist())


def _structs(array: Any) -> list[dict[str, Any]]:
    """Arrow gives each struct the fields of all the others, as null: these go."""
    names = [field.name for field in array.type]
    if not names:
        return [{} for _ in range(len(array))]
    columns = [_values(child) for child in array.flatten()]
    return [{name: value for name, value in zip(names, row, strict=True) if value is not None}
            for row in zip(*columns, strict=True)]


def _lists(array: Any, inner: Any) -> list[list[Any]]:
    offsets = array.offsets.to_pylist()
    first = offsets[0] if offsets else 0
    values = _values(inner.slice(first, (offsets[-1] if offsets else 0) - first))
    return [values[start - first:stop - first] for start, stop in pairwise(offsets)]


def _where_valid(array: Any, values: list[Any]) -> list[Any]:
    if array.null_count == 0:
        return values
    return [value if valid else None for value, valid in zip(values, array.is_valid().to_pylist(), strict=True)]
