"""A .json file: an array of rows of any size, one object, or in truth JSON lines.

An array is cut into its elements by brackets and strings alone, over a memory map, so that nothing is held
but the element at hand and an element that is not valid JSON hides no other. Where that structure itself
breaks, reading ends with one fault.
"""

from __future__ import annotations

import json
import mmap
import re
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import NamedTuple

from shardwise.data.faults import RowFault
from shardwise.data.read import jsontext
from shardwise.data.read.jsontext import BLANK, BOM
from shardwise.data.rows import Read

# Up to the next bracket, past whole strings. Empty where none is left or a string never ends. The bound keeps the
# engine's memory small (a possessive `*+` would too, but Python before 3.11.5 gets one around a choice wrong).
_BRACKET = re.compile(rb'(?:[^"\[\]{}]++|"[^"\\]*+(?:\\.[^"\\]*+)*+"){0,1000}([\[\]{}])?', re.DOTALL)
_LOOSE = re.compile(rb'"(?:[^"\\]|\\.)*"|[^\s,"]+', re.DOTALL)
_NOT_BLANK = re.compile(rb"[^ \t\r\n]")
_OPENING = b"[{"
_LONGEST_GAP = 1 << 20


class Span(NamedTuple):
    """Bytes [start, stop) of a row and the line it starts on; `fault` where there is no row but a breach."""

    start: int
    stop: int
    line: int
    fault: str | None = None


def pieces(path: Path, bytes_per_piece: int) -> Iterator[tuple[str, int, int, int]]:
    """(kind, start, stop, first line): pieces that start at an element; one of kind `lines` for JSON lines."""
    size = path.stat().st_size
    if size == 0:
        return
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        begin = _after_blank(data, len(BOM) if data[:3] == BOM else 0)
        if begin == size:
            return
        if data[begin] != b"["[0]:
            yield ("lines" if _holds_lines(data, begin) else "json"), 0, size, 1
            return
        start, line = begin + 1, 1 + _newlines(data, 0, begin)
        for span in spans(data, start, size, line):
            if span.fault is None and span.start - start >= bytes_per_piece:
                yield "json", start, span.start, line
                start, line = span.start, span.line
        yield "json", start, size, line


def read(path: Path, start: int, stop: int, line: int) -> Iterator[Read]:
    """The rows of one piece, or what is wrong with each."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        if start == 0:  # an array's first piece starts after its bracket
            begin = _after_blank(data, len(BOM) if data[:3] == BOM else 0)
            yield _row(data, Span(begin, stop, 1 + _newlines(data, 0, begin)))
            return
        broken = False
        for span in spans(data, start, stop, line):
            if span.fault is None:
                row = _row(data, span)
                broken = isinstance(row.value, RowFault) and row.value.kind == "broken_json"
                yield row
            elif not broken:  # else the row before it is the damage
                yield Read(span.line, RowFault("broken_json", span.fault))


def spans(data: mmap.mmap, start: int, stop: int, line: int) -> Iterator[Span]:
    """The elements of an array in [start, stop): to its end, or to where another element starts."""
    depth, opened, done = 0, start, start  # `done`: the end of the last element; `line` is the line there
    for match in _BRACKET.finditer(data, start, stop):
        at = match.end() - 1
        if match.lastindex is None:
            if match.end() == match.start():
                break
            continue
        if data[at] in _OPENING:
            depth += 1
            opened = at if depth == 1 else opened
            continue
        depth -= 1
        if depth > 0:
            continue
        end = opened if depth == 0 else at
        breach = yield from _between(data, done, end, line, before=done > start, after=depth == 0)
        if breach:
            return
        line += _newlines(data, done, end)
        if depth < 0:
            yield from _after_array(data, at, stop, line)
            return
        yield Span(opened, at + 1, line)
        line, done = line + _newlines(data, opened, at + 1), at + 1
    if depth > 0:  # cut off inside an element, or a bracket or quote of it is missing
        breach = yield from _between(data, done, opened, line, before=done > start, after=True)
        if not breach:
            yield Span(opened, stop, line + _newlines(data, done, opened))
    elif stop < len(data):
        yield from _between(data, done, stop, line, before=done > start, after=True)
    else:
        yield Span(done, stop, line + _newlines(data, done, stop), "the file ends inside the array: was it cut off?")


def _after_array(data: mmap.mmap, at: int, stop: int, line: int) -> Iterator[Span]:
    if data[at] != b"]"[0]:
        yield Span(at, stop, line, "the array breaks off here: a } too many")
    elif (rest := _after_blank(data, at + 1)) < stop:
        yield Span(rest, stop, line + _newlines(data, at, rest), "text after the end of the array")


def _between(data: mmap.mmap, start: int, stop: int, line: int, *, before: bool,
             after: bool) -> Generator[Span, None, bool]:
    """What stands between two elements: a comma as a rule; values that are no objects; or a breach (returned)."""
    gap = data[start:min(stop, start + _LONGEST_GAP)]
    if gap.strip(BLANK) == (b"," if before and after else b""):
        return False
    text = gap.decode("utf-8", "replace")
    try:
        json.loads(f"[{'{}' if before else ''}{text}{'{}' if after else ''}]", parse_int=str)
    except ValueError:
        at = len(gap) - len(gap.lstrip(BLANK))
        near = jsontext.shown(text.strip())
        yield Span(start + at, stop, line + gap.count(b"\n", 0, at), f"the array breaks off here: {near}")
        return True
    counted = 0
    for value in _LOOSE.finditer(gap):
        line, counted = line + gap.count(b"\n", counted, value.start()), value.start()
        yield Span(start + value.start(), start + value.end(), line)
    return False


def _row(data: mmap.mmap, span: Span) -> Read:
    if span.stop - span.start > jsontext.LONGEST:
        return Read(span.line, RowFault("oversized_row", jsontext.TOO_LONG))
    content = data[span.start:span.stop]
    try:
        return Read(span.line, jsontext.row_of(content))
    except RowFault as fault:
        line = span.line
        if fault.kind == "broken_json":
            text = content.decode("utf-8")
            line += text.count("\n", 0, jsontext.damage(text))
        return Read(line, fault)


def _holds_lines(data: mmap.mmap, begin: int) -> bool:
    """Whether a second row follows the first line, where the file is not one object over several lines."""
    end = data.find(b"\n", begin)
    second = _after_blank(data, end) if end >= 0 else len(data)
    if second == len(data):
        return False
    if _is_row(data[begin:min(end, begin + jsontext.LONGEST)]):
        return True
    return data[second] == b"{"[0] and not _is_row(data[begin:begin + jsontext.LONGEST])


def _is_row(content: bytes) -> bool:
    try:
        jsontext.row_of(content)
    except RowFault as fault:
        return fault.kind != "broken_json"
    return True


def _after_blank(data: mmap.mmap, at: int) -> int:
    found = _NOT_BLANK.search(data, at)
    return found.start() if found else len(data)


def _newlines(data: mmap.mmap, start: int, stop: int) -> int:
    step = 1 << 20
    if stop - start <= step:
        return data[start:stop].count(b"\n")
    return sum(data[at:min(at + step, stop)].count(b"\n") for at in range(start, stop, step))
