"""`shardwise data show`: one row of the data as the model sees it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from shardwise.config.schema import DataConfig, SourceConfig
from shardwise.data.faults import KINDS, RowFault
from shardwise.data.look import view
from shardwise.data.read.files import files_of
from shardwise.data.read.readers import plan, read
from shardwise.data.rows import Encoded, Read
from shardwise.data.store import worker
from shardwise.data.store.build import format_of
from shardwise.data.store.cached import chat_template
from shardwise.errors import DataError, UserError


@dataclass(frozen=True)
class Shown:
    """A row, where it is, and what it comes to."""

    place: str
    row: Read
    result: list[Encoded] | RowFault


def find(which: str, sources: tuple[SourceConfig, ...], data: DataConfig, tokenizer: Any) -> Shown:
    """Row number `which` (from 1, over all sources), or the one at FILE:LINE. Raises UserError when there is none."""
    if which.isdecimal() and len(which) < 19:
        wanted, passed = int(which), 0
        for source in sources:
            rows = islice(_rows(source), source.limit)
            for place, row in rows:
                passed += 1
                if passed == wanted:
                    return _shown(place, row, source, data, tokenizer)
        raise UserError(f"--row {which}: the data has {passed:,} rows, numbered from 1")
    file, _, line = which.rpartition(":")
    if not file or not line.isdecimal() or len(line) >= 19:
        raise UserError(f"--row {which}: give a number, or FILE:LINE as `data check` prints it")
    for source in sources:
        for place, row in _rows(source, only=file):
            if row.line == int(line):
                return _shown(place, row, source, data, tokenizer)
    raise UserError(f"--row {which}: no row begins there; the addresses are those `data check` prints")


def _rows(source: SourceConfig, only: str | None = None) -> Iterator[tuple[str, Read]]:
    for file in files_of(source):
        if only is None or only == file.shown or Path(only).absolute() == Path(file.shown).absolute():
            for unit in plan(file):
                yield from ((f"{file.shown}:{row.line}", row) for row in read(unit))


def _shown(place: str, row: Read, source: SourceConfig, data: DataConfig, tokenizer: Any) -> Shown:
    job = worker.job(source, data, tokenizer, template=chat_template(data, tokenizer),
                     format=format_of(files_of(source), source, data.task))
    return Shown(place, row, worker.encoded([row.value], job, job.encoder())[0])


def page(shown: Shown, tokenizer: Any, *, recipe: str, html: bool, colour: bool, width: int) -> str:
    """The row for the terminal, or as an HTML page. Raises DataError with the reason where it is not trained on."""
    if isinstance(shown.result, RowFault):
        raw = "" if isinstance(shown.row.value, RowFault) else \
            f"\n  the row: {json.dumps(shown.row.value, ensure_ascii=True)[:2000]}"
        kind = shown.result.kind
        raise DataError(f"{shown.place}: not trained on: {shown.result.text}\n"
                        f"  fault: {kind} ({KINDS[kind].meaning}){raw}")
    header = [f"recipe: {recipe}", f"row: {shown.place}", f"tokenizer: {tokenizer.name_or_path}"]
    notes = sorted({note for example in shown.result for note in example.notes})
    header += [f"notes: {', '.join(notes)}"] if notes else []
    pieces = [piece for number, example in enumerate(shown.result)
              for piece in view.pieces(tokenizer, example, number)]
    if html:
        return view.html(pieces, f"{Path(shown.place).name} as the model sees it", header)
    return view.terminal(pieces, header, colour=colour, width=width)
