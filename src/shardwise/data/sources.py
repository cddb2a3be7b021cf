"""Files and hub data sets as raw rows: the text of each row and the FILE:LINE it came from.

Rows stay text until they are tokenised, so no reader can guess types from them (a date stays a date string,
a column that is null for 60,000 rows may hold text in the next).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from shardwise import demo
from shardwise.config.schema import SourceConfig
from shardwise.errors import DataError

JSON_LINES = (".jsonl", ".ndjson")
PLAIN_TEXT = (".txt", ".md", ".rst")


class RawRow(NamedTuple):
    """One row as text: a JSON object, or the whole of a plain-text file (`kind` is json or text)."""

    raw: str
    kind: str
    place: str


def raw_rows(sources: Sequence[SourceConfig]) -> Iterator[RawRow]:
    """All rows of all sources, in order. Raises DataError naming the file and line that cannot be read."""
    for source in sources:
        yield from islice(_rows_of(source), source.limit)


def _rows_of(source: SourceConfig) -> Iterator[RawRow]:
    if source.hub is not None:
        yield from _hub_rows(source)
        return
    path = local_path(source)
    if path.suffix in JSON_LINES:
        yield from _json_lines(path)
    elif path.suffix in PLAIN_TEXT:
        yield RawRow(_decoded(path.read_bytes(), f"{path}:1"), "text", f"{path}:1")
    else:
        raise DataError(f"{path}: unknown kind of file {path.suffix!r}; "
                        f"known: {', '.join((*JSON_LINES, *PLAIN_TEXT))}")


def local_path(source: SourceConfig) -> Path:
    """The file behind a `path` source. Raises DataError when there is none."""
    path = Path(demo.resolve(source.path or ""))
    if not path.is_file():
        raise DataError(f"{path}: no such file (from {Path.cwd()})")
    return path


def _json_lines(path: Path) -> Iterator[RawRow]:
    found = False
    with open(path, "rb") as file:  # bytes, so that only \n ends a line (never U+2028 or NEL)
        for number, line in enumerate(file, start=1):
            place = f"{path}:{number}"
            if number == 1:
                line = line.removeprefix(b"\xef\xbb\xbf")
            text = _decoded(line, place).strip(" \t\r\n")
            if text:
                found = True
                yield RawRow(text, "json", place)
    if not found:
        raise DataError(f"{path}: 0 rows; the file is empty")


def _decoded(data: bytes, place: str) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{place}: byte {error.start} ({data[error.start]:#04x}) is not UTF-8") from None


def _hub_rows(source: SourceConfig) -> Iterator[RawRow]:
    import datasets

    try:
        rows = datasets.load_dataset(source.hub, split=source.split)
    except Exception as error:  # the library raises many kinds; all are about this source
        raise DataError(f"data set {source.hub!r}, split {source.split!r}: {error}") from None
    for number, row in enumerate(rows):
        yield RawRow(json.dumps(row, ensure_ascii=False, default=str), "json",
                     f"{source.hub}[{source.split}]:{number}")


def parsed(row: RawRow) -> dict[str, Any]:
    """A row as an object: `{"text": ...}` for plain text. Raises DataError for broken JSON."""
    if row.kind == "text":
        return {"text": row.raw}
    try:
        value = json.loads(row.raw)
    except (json.JSONDecodeError, RecursionError) as error:
        raise DataError(f"{row.place}: not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise DataError(f"{row.place}: a row is a JSON object, not {type(value).__name__}")
    return value


def messages_of(row: RawRow) -> list[dict[str, Any]]:
    """The chat of a row. Raises DataError naming what is wrong with it."""
    value = parsed(row)
    messages = value.get("messages")
    if messages is None:
        raise DataError(f"{row.place}: no `messages`; found {', '.join(value) or 'no key'}")
    if not isinstance(messages, list) or not all(isinstance(m, dict) for m in messages):
        raise DataError(f"{row.place}: `messages` must be a list of objects with role and content")
    for turn, message in enumerate(messages):
        if not isinstance(message.get("role"), str):
            raise DataError(f"{row.place}: turn {turn} has no role")
        content = message.get("content")
        if not isinstance(content, str):
            raise DataError(f"{row.place}: turn {turn} ({message['role']}) has content "
                            f"{json.dumps(content)[:40]}; text is wanted")
        _no_surrogates(content, row.place, turn)
    if not any(message["role"] == "assistant" for message in messages):
        raise DataError(f"{row.place}: no assistant turn, so there is nothing to learn from")
    return messages


def text_of(row: RawRow) -> str:
    """The text of a pretraining row. Raises DataError when there is none."""
    value = parsed(row)
    text = value.get("text")
    if not isinstance(text, str):
        raise DataError(f"{row.place}: no `text`; found {', '.join(value) or 'no key'}")
    _no_surrogates(text, row.place, None)
    return text


def _no_surrogates(text: str, place: str, turn: int | None) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        where = place if turn is None else f"{place}: turn {turn}"
        raise DataError(f"{where}: character {error.start} is a lone surrogate, which is not text") from None
