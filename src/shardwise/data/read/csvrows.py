"""Rows of a .csv or .tsv file. One record that cannot be read does not take the lines after it along."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from typing import IO

from shardwise.data.faults import RowFault
from shardwise.data.read import jsontext
from shardwise.data.rows import Read


def read(stream: IO[bytes], delimiter: str) -> Iterator[Read]:
    """Each record under the names of the first; its line is the one it starts on."""
    csv.field_size_limit(2 * jsontext.LONGEST)  # the limit that counts is the one on whole records
    lines = _Lines(stream)
    records = _records(lines, delimiter)
    header = next(records, [])
    fault = header if isinstance(header, RowFault) else _header_fault(header)
    if fault:
        yield Read(lines.first, fault)
        return
    assert not isinstance(header, RowFault)
    for record in records:
        if record:
            value = record if isinstance(record, RowFault) else _row(record, header)
            yield Read(lines.first, value)


class _Lines:
    """Lines for csv.reader, ended by \\n alone; it knows where the record at hand began and can go back there."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self._waiting: list[str] = []  # lines handed back, the next one last
        self._record: list[str] = []
        self._size = 0
        self._line = 0  # of the last line handed out
        self.first = 1
        """Line that the record at hand starts on."""

    def begin(self) -> None:
        self.first, self._record, self._size = self._line + 1, [], 0

    def hand_back(self) -> None:
        """Give the lines of this record out again, but for its first: a stray quote had swallowed them."""
        swallowed = self._record[1:]
        self._waiting += reversed(swallowed)
        self._line -= len(swallowed)

    def __iter__(self) -> _Lines:
        return self

    def __next__(self) -> str:
        text = self._waiting.pop() if self._waiting else self._read()
        self._line += 1
        self._record.append(text)
        self._size += len(text)
        if self._size > jsontext.LONGEST:
            self.hand_back()
            raise RowFault("oversized_row", f"{jsontext.TOO_LONG} (or a quote is opened here and not closed)")
        return text

    def _read(self) -> str:
        data = part = self._stream.readline(jsontext.LONGEST + 1)
        if not data:
            raise StopIteration
        while part and not part.endswith(b"\n"):  # longer than any row may be: the rest is not kept
            part = self._stream.readline(1 << 20)
        # A byte that is not UTF-8 becomes a lone surrogate, which `_row` finds: only its record is refused.
        text = data.decode("utf-8", "surrogateescape")
        return text.removeprefix("\ufeff") if self._line == 0 else text


def _records(lines: _Lines, delimiter: str) -> Iterator[list[str] | RowFault]:
    reader = csv.reader(lines, delimiter=delimiter, strict=True)
    while True:
        lines.begin()
        try:
            yield next(reader)
        except StopIteration:
            return
        except RowFault as fault:
            yield fault
        except csv.Error as error:
            lines.hand_back()
            yield RowFault("broken_json", f"not a valid CSV record: {jsontext.printable(str(error), 200)}")


def _header_fault(names: list[str]) -> RowFault | None:
    for column, name in enumerate(names, start=1):
        if fault := _bad_utf8(name, f"the name of column {column}"):
            return fault
        if name in names[:column - 1]:
            return RowFault("broken_json", f"the header names column '{jsontext.printable(name)}' twice, so no row "
                                           "can be read")
    return None


def _row(cells: list[str], names: list[str]) -> dict[str, str] | RowFault:
    if len(cells) != len(names):
        return RowFault("broken_json", f"{len(cells)} cells where the header has {len(names)} names")
    for name, cell in zip(names, cells, strict=True):
        if fault := _bad_utf8(cell, jsontext.printable(name)):
            return fault
    return dict(zip(names, cells, strict=True))


def _bad_utf8(text: str, what: str) -> RowFault | None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        byte = ord(text[error.start]) & 0xFF
        return RowFault("bad_utf8", f"{what}: after {error.start} characters, byte {byte:#04x} is not UTF-8")
    return None
