"""Rows read as they are needed, for data larger than the disk: nothing is kept, memory is one group of pieces.

Every rank reads the same rows in the same order and makes the same global steps of them; the hardware only
splits those, as it does with stored data. So each row is used once per epoch whatever the ranks and workers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from shardwise.config.schema import DataConfig, SourceConfig
from shardwise.data.faults import KINDS, RowFault
from shardwise.data.read import hub
from shardwise.data.read.files import files_of
from shardwise.data.read.readers import Unit, plan, read
from shardwise.data.rows import Encoded
from shardwise.data.store import worker
from shardwise.data.store.build import first_format, format_of
from shardwise.data.store.cached import chat_template
from shardwise.data.store.findings import policy_of
from shardwise.errors import DataError

PIECES_AT_ONCE = 4
"""Pieces of files (4 MiB each) whose rows are shuffled together."""
ROWS_AT_ONCE = 10_000
"""Rows of a hub data set that are shuffled together."""
ROWS_PER_BATCH = 64


class Cursor(NamedTuple):
    """How far a run has read; kept in its checkpoints."""

    epoch: int = 0
    group: int = 0
    row: int = 0
    """Rows of the group, in its shuffled order, that are used up."""
    part: int = 0
    """Examples of the next row (tokens of it, for pretraining) that are used up."""


class Raw(NamedTuple):
    """A row on its way."""

    source: int
    place: str
    value: Any


class Example(NamedTuple):
    """An example, where it is from, and the cursor behind it."""

    encoded: Encoded
    place: str
    after: Cursor


class Stream:
    """Examples of all sources, epoch after epoch, from a cursor on."""

    def __init__(self, data: DataConfig, tokenizer: Any, *, seed: int, held_out: frozenset[int] = frozenset()) -> None:
        self.data, self.seed, self.held_out = data, seed, held_out
        self.hubs = {n: hub.opened(source, streaming=True)
                     for n, source in enumerate(data.train) if source.hub is not None}
        files = {n: files_of(source) for n, source in enumerate(data.train) if source.hub is None}
        self.units = [(n, unit) for n, found in files.items() for file in found for unit in plan(file)]
        template = chat_template(data, tokenizer)
        self.jobs = [worker.job(
            source, data, tokenizer, template=template,
            format=format_of(files[n], source, data.task) if n in files
            else first_format(_rows_of(self.hubs[n], source), source, data.task))
            for n, source in enumerate(data.train)]
        self.encoder = self.jobs[0].encoder()
        self.dropped: dict[str, int] = {}
        self.content = {"files": [(file.kind, file.path.stat().st_size) for found in files.values() for file in found],
                        "hub": [(s.hub, s.subset, s.split) for s in data.train if s.hub is not None],
                        # A cursor counts in these.
                        "pieces": [len(self.units), PIECES_AT_ONCE, ROWS_AT_ONCE],
                        "sources": [repr((s.format, s.columns, s.roles)) for s in data.train],
                        "template": template or tokenizer.chat_template}
        """What a resumed run must have in common; the rows themselves are too many to look at."""

    def examples(self, cursor: Cursor) -> Iterator[Example | None]:
        """Examples from the cursor on; None stands between two epochs. Raises DataError by the policy."""
        while True:
            found = False
            for example in self._epoch(cursor):
                found = True
                yield example
            if not found and cursor == Cursor(cursor.epoch):
                raise DataError("data.train: no usable example in a whole epoch "
                                f"(left out: {self.dropped or 'no row was read'})")
            yield None
            cursor = Cursor(cursor.epoch + 1)

    def _epoch(self, cursor: Cursor) -> Iterator[Example]:
        if self.data.task == "pretrain":
            yield from self._blocks(cursor)
            return
        for at, raw, result in self._results(cursor):
            skip = cursor.part if (at.group, at.row) == (cursor.group, cursor.row) else 0
            for number, encoded in enumerate(result):
                if number >= skip:
                    last = number + 1 == len(result)
                    after = at._replace(row=at.row + 1) if last else at._replace(part=number + 1)
                    yield Example(encoded, raw.place, after)

    def _blocks(self, cursor: Cursor) -> Iterator[Example]:
        """Documents as one stream, cut into blocks; the last one of an epoch is shorter."""
        length = self.data.max_length
        pending, place, at = np.zeros(0, np.int32), "", cursor
        for at, raw, result in self._results(cursor):
            document = np.concatenate([encoded.ids for encoded in result])
            skip = cursor.part if (at.group, at.row) == (cursor.group, cursor.row) else 0
            used = skip
            while len(pending) + len(document) - used >= length:
                take = length - len(pending)
                ids = np.concatenate([pending, document[used:used + take]])
                used += take
                yield _block(ids, place if len(pending) else raw.place, at._replace(part=used))
                pending = np.zeros(0, np.int32)
            place = place if len(pending) else raw.place
            pending = np.concatenate([pending, document[used:]])
        if len(pending) > 1:
            yield _block(pending, place, Cursor(cursor.epoch + 1))

    def _results(self, cursor: Cursor) -> Iterator[tuple[Cursor, Raw, list[Encoded]]]:
        """(cursor before it, row, what it comes to) of every usable row of an epoch from the cursor on."""
        for group, rows in enumerate(self._groups(cursor.epoch, cursor.group)):
            order = np.random.Generator(np.random.PCG64([self.seed, cursor.epoch, group])).permutation(len(rows))
            first = cursor.row if group == cursor.group else 0
            todo = iter(range(first, len(rows)))
            while batch := list(islice(todo, ROWS_PER_BATCH)):
                chosen = [rows[order[i]] for i in batch]
                for i, raw, result in zip(batch, chosen, self._encoded(chosen), strict=True):
                    if usable := self._judged(raw, result):
                        yield Cursor(cursor.epoch, group, i), raw, usable

    def _encoded(self, rows: Sequence[Raw]) -> list[list[Encoded] | RowFault]:
        results: list[Any] = [None] * len(rows)
        for source, job in enumerate(self.jobs):
            mine = [i for i, raw in enumerate(rows) if raw.source == source]
            for i, result in zip(mine, worker.encoded([rows[i].value for i in mine], job, self.encoder), strict=True):
                results[i] = result
        return results

    def _judged(self, raw: Raw, result: list[Encoded] | RowFault) -> list[Encoded]:
        """What is left of a row by the policy."""
        if isinstance(result, RowFault):
            self._refuse_or_count(result.kind, raw, result.text)
            return []
        kept = []
        for encoded in result:
            notes = [note for note in encoded.notes if note in KINDS]
            if self.held_out and worker.mark(encoded.ids) in self.held_out:
                notes.append("eval_overlap")
            drop = [note for note in notes if self._refuse_or_count(note, raw, KINDS[note].meaning) == "drop"]
            kept += [] if drop else [encoded]
        return kept

    def _refuse_or_count(self, kind: str, raw: Raw, text: str) -> str:
        policy = policy_of(kind, self.data)
        if policy == "error":
            raise DataError(f"{raw.place}: {text} ({kind}); mend it, or set " + (
                "data.on_too_long" if kind == "too_long" else f"data.on_fault.{kind}") + "=drop")
        if policy == "drop":
            self.dropped[kind] = self.dropped.get(kind, 0) + 1
        return policy

    def _groups(self, epoch: int, first: int) -> Iterator[list[Raw]]:
        """Rows that are shuffled together; which they are differs from epoch to epoch.

        The groups before `first` come empty: their files are not read again.
        """
        order = np.random.Generator(np.random.PCG64([self.seed, epoch])).permutation(len(self.units))
        pieces = iter([self.units[i] for i in order])
        number = 0
        while group := list(islice(pieces, PIECES_AT_ONCE)):
            yield [raw for source, unit in group for raw in _read(source, unit)] if number >= first else []
            number += 1
        for source, dataset in self.hubs.items():
            rows = enumerate(_rows_of(dataset, self.data.train[source]), start=1)
            name = f"{self.data.train[source].hub}[{self.data.train[source].split}]"
            while some := list(islice(rows, ROWS_AT_ONCE)):
                yield [Raw(source, f"{name}:{line}", value) for line, value in some] if number >= first else []
                number += 1


def _read(source: int, unit: Unit) -> Iterable[Raw]:
    return (Raw(source, f"{unit.file.shown}:{row.line}", row.value) for row in read(unit))


def _block(ids: np.ndarray, place: str, after: Cursor) -> Example:
    weights = np.ones(len(ids), np.float32)
    weights[:1] = 0
    return Example(Encoded(ids, weights), place, after)


def _rows_of(dataset: Any, source: SourceConfig) -> Iterator[dict[str, Any]]:
    with hub.explained(source):
        yield from dataset
