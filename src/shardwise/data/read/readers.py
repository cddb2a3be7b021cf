"""A data file in pieces, and each piece as rows.

A piece is small, so that any number of processes may share one file and none holds much of it. One bad row
never hides the others: it becomes a fault with its line, and reading goes on.
"""

from __future__ import annotations

import gzip
import tempfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, cast

from shardwise.data.faults import RowFault
from shardwise.data.read import arrays, csvrows, jsontext
from shardwise.data.read.files import DataFile
from shardwise.data.read.jsontext import BLANK, BOM
from shardwise.data.rows import Read

_BLOCK = 1 << 20


@dataclass(frozen=True)
class Unit:
    """A piece of one file. It may be sent to another process."""

    file: DataFile
    start: int
    """First byte (of parquet: first row, counted from 0)."""
    stop: int
    """Behind the last one."""
    first_line: int
    """Line, counted from 1, that `start` is on."""


def plan(file: DataFile, *, bytes_per_unit: int = 4 << 20) -> list[Unit]:
    """A file in pieces of about this size that start and end between rows; one that cannot be cut stays whole.

    Raises DataError for a parquet file that cannot be opened.
    """
    return list(units(file, bytes_per_unit=bytes_per_unit))


def units(file: DataFile, *, bytes_per_unit: int = 4 << 20) -> Iterator[Unit]:
    """The same one by one, reading no further than is needed for each."""
    if file.kind == "parquet":
        from shardwise.data.read import parquet  # pyarrow takes a while to load

        for start, stop in parquet.ranges(file.path, file.shown, bytes_per_unit):
            yield Unit(file, start, stop, start + 1)
    elif file.kind == "jsonl" and not file.gz:
        yield from _line_units(file, bytes_per_unit)
    elif file.kind == "json" and not file.gz:
        for kind, start, stop, line in arrays.pieces(file.path, bytes_per_unit):
            if kind == "lines":  # it is JSON lines in truth
                yield from _line_units(file._replace(kind="jsonl"), bytes_per_unit)
                return
            yield Unit(file, start, stop, line)
    elif size := file.path.stat().st_size:
        yield Unit(file, 0, size, 1)


def read(unit: Unit) -> Iterator[Read]:
    """Every row of a piece with its line; in place of a row that cannot be read, what is wrong with it."""
    file = unit.file
    if file.kind == "parquet":
        from shardwise.data.read import parquet

        return parquet.read(file.path, file.shown, unit.start, unit.stop)
    if file.gz:
        return _read_packed(file)
    if file.kind == "json":
        return arrays.read(file.path, unit.start, unit.stop, unit.first_line)
    return _read_plain(unit)


def _line_units(file: DataFile, bytes_per_unit: int) -> Iterator[Unit]:
    start, line = 0, 1
    with file.path.open("rb") as stream:
        while part := stream.read(bytes_per_unit):
            lines = part.count(b"\n")
            while part and not part.endswith(b"\n"):  # on to the end of the line, however long it is
                part = stream.readline(_BLOCK)
                lines += part.endswith(b"\n")
            yield Unit(file, start, stream.tell(), line)
            start, line = stream.tell(), line + lines


def _read_plain(unit: Unit) -> Iterator[Read]:
    with unit.file.path.open("rb") as stream:
        stream.seek(unit.start)
        yield from _rows(unit.file, stream, unit.first_line, unit.stop - unit.start)


def _rows(file: DataFile, stream: IO[bytes], line: int, size: int | None) -> Iterator[Read]:
    if file.kind == "csv":
        return csvrows.read(stream, "\t" if file.path.name.lower().removesuffix(".gz").endswith(".tsv") else ",")
    if file.kind == "text":
        return _text(stream)
    return _json_lines(stream, line, size)


def _json_lines(stream: IO[bytes], line: int, size: int | None) -> Iterator[Read]:
    """The rows of so many bytes (None: of all there are). Only \\n ends a line, never U+2028 or a lone \\r."""
    longest = jsontext.LONGEST + 2  # with its line end
    done = 0
    while (size is None or done < size) and (data := stream.readline(longest)):
        done += len(data)
        ended = data.endswith(b"\n")
        if len(data) == longest and not ended:
            done += _skip_line(stream)
            yield Read(line, RowFault("oversized_row", jsontext.TOO_LONG))
        elif data := (data.removeprefix(BOM) if line == 1 else data).rstrip(BLANK):
            yield Read(line, _json_row(data, ended))
        line += 1


def _json_row(data: bytes, ended: bool) -> dict[str, object] | RowFault:
    try:
        return jsontext.row_of(data)
    except RowFault as fault:
        if fault.kind == "broken_json" and not ended:
            return RowFault(fault.kind, f"{fault} (the last line, without a line end: was the file cut off?)")
        return fault


def _skip_line(stream: IO[bytes]) -> int:
    skipped = 0
    while part := stream.readline(_BLOCK):
        skipped += len(part)
        if part.endswith(b"\n"):
            break
    return skipped


def _text(stream: IO[bytes]) -> Iterator[Read]:
    data = stream.read(jsontext.LONGEST + len(BOM) + 1).removeprefix(BOM)
    try:
        if len(data) > jsontext.LONGEST:
            raise RowFault("oversized_row", "a text file is one row, and this one has more than 16 MiB; cut it up, "
                                            "or make it JSON lines of {\"text\": ...}")
        if data:
            yield Read(1, {"text": jsontext.decoded(data)})
    except RowFault as fault:
        yield Read(1, fault)


def _read_packed(file: DataFile) -> Iterator[Read]:
    """A .gz file cannot be cut: it is unpacked as it is read. Damage ends it with one fault after what is whole."""
    line = 0
    try:
        with gzip.GzipFile(file.path, "rb") as stream:
            plain = cast(IO[bytes], stream)
            for row in _packed_json(file, stream) if file.kind == "json" else _rows(file, plain, 1, None):
                line = row.line
                yield row
    except (OSError, EOFError, zlib.error) as error:
        yield Read(line + 1, RowFault("broken_json", f"the .gz file is damaged from here on: {error}"))


def _packed_json(file: DataFile, stream: gzip.GzipFile) -> Iterator[Read]:
    """An array is scanned in place, which only a file on disk allows."""
    with tempfile.NamedTemporaryFile(prefix="shardwise-", suffix=".json") as unpacked:
        damage: Exception | None = None
        try:
            while part := stream.read1(_BLOCK):  # `read` would lose what comes before the damage
                unpacked.write(part)
        except (OSError, EOFError, zlib.error) as error:
            damage = error
        unpacked.flush()
        for unit in plan(DataFile(Path(unpacked.name), file.shown, "json", False)):
            yield from read(unit)
        if damage:
            raise damage
