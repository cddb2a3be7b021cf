"""One unit of raw rows -> one pair of files: tokens and an index. Runs in as many processes as there are cores."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import islice
from multiprocessing import parent_process
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np

from shardwise.config.schema import DataConfig, SourceConfig
from shardwise.data.faults import RowFault
from shardwise.data.mask.encode import ChatEncoder, TextEncoder
from shardwise.data.read import formats, lint
from shardwise.data.read.readers import Unit, read
from shardwise.data.rows import FLAGS, Encoded
from shardwise.errors import PreflightError

ROWS_PER_BATCH = 256
IGNORED = (signal.SIGINT, signal.SIGUSR1)
"""Ctrl-C and a batch system's warning reach the whole group; the parent decides."""
FAULTS_KEPT = 1000
"""Rows whose address is kept for each kind of fault; the counts are of all."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is to be done with every unit of a source; picklable."""

    source: SourceConfig
    task: str
    format: str | None
    """The source's format as its first rows show it; None where none fits."""
    tokenizer: Any
    template: str | None
    supervise: str | tuple[str, ...]
    max_length: int
    on_too_long: str
    folder: Path
    keep_tokens: bool = True
    """Whether ids and weights are written, or only counted."""

    def encoder(self) -> ChatEncoder | TextEncoder:
        """The encoder of this task."""
        if self.task == "pretrain":
            return TextEncoder(self.tokenizer)
        return ChatEncoder(self.tokenizer, template=self.template, supervise=self.supervise,
                           max_length=self.max_length, on_too_long=self.on_too_long)


def job(source: SourceConfig, data: DataConfig, tokenizer: Any, *, template: str | None, format: str | None,
        folder: Path = Path(), keep_tokens: bool = True) -> Job:
    """What the settings ask for; without `folder` for rows that are not published."""
    return Job(source=source, task=data.task, format=format, tokenizer=tokenizer, template=template,
               supervise=data.supervise, max_length=data.max_length, on_too_long=data.on_too_long, folder=folder,
               keep_tokens=keep_tokens)


@dataclass
class Rows:
    """What a unit comes to, column by column."""

    ids: list[np.ndarray] = field(default_factory=list)
    weights: list[np.ndarray] = field(default_factory=list)
    places: list[tuple[int, int]] = field(default_factory=list)
    """Line and flags of each example."""
    hashes: list[int] = field(default_factory=list)
    faults: list[tuple[str, int, str]] = field(default_factory=list)
    """kind, line, text."""
    faults_in_all: Counter[str] = field(default_factory=Counter)
    num_rows: int = 0

    def add(self, line: int, result: list[Encoded] | RowFault) -> None:
        """Take in what one row came to."""
        self.num_rows += 1
        if isinstance(result, RowFault):
            self.faults_in_all[result.kind] += 1
            if self.faults_in_all[result.kind] <= FAULTS_KEPT:
                self.faults.append((result.kind, line, result.text))
            return
        for example in result:
            self.ids.append(example.ids)
            self.weights.append(example.weights)
            self.places.append((line, sum(1 << FLAGS.index(note) for note in example.notes)))
            self.hashes.append(mark(example.ids))


def mark(ids: np.ndarray) -> int:
    """64 bits that tell token sequences apart."""
    return int.from_bytes(blake2b(ids.tobytes(), digest_size=8).digest(), "little")


_state: dict[str, Any] = {}


def start(job: Job) -> None:
    """Prepare a worker process: its encoder once, and an end when its parent is gone."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)
    parent = parent_process()  # as it was at the start: by now it may be gone already

    def watch() -> None:
        while parent is not None and os.getppid() == parent.pid:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
    _state["job"], _state["encoder"] = job, job.encoder()


def work(number: int, unit: Unit) -> int:
    """`run` in a worker process."""
    return run(number, unit, _state["job"], _state["encoder"])


def run(number: int, unit: Unit, job: Job, encoder: ChatEncoder | TextEncoder, limit: int | None = None) -> int:
    """Encode a unit's rows, or the first `limit` of them, and publish its files; returns how many rows."""
    rows = Rows()
    source = islice(read(unit), limit)
    while batch := list(islice(source, ROWS_PER_BATCH)):
        for row, result in zip(batch, encoded([row.value for row in batch], job, encoder), strict=True):
            rows.add(row.line, result)
    with writing(job.folder):
        _publish(job.folder, number, rows, job.keep_tokens)
    return rows.num_rows


def encoded(values: Sequence[dict[str, Any] | RowFault], job: Job,
            encoder: ChatEncoder | TextEncoder) -> list[list[Encoded] | RowFault]:
    """What each row comes to, in order."""
    prepared = [_prepared(value, job) for value in values]
    good: list[Any] = [item for item in prepared if not isinstance(item, RowFault)]
    results: Iterator[list[Encoded] | RowFault] = iter(encoder(good))
    return [item if isinstance(item, RowFault) else next(results) for item in prepared]


def _prepared(value: dict[str, Any] | RowFault, job: Job) -> Any:
    """A Chat or a text, or the fault."""
    if isinstance(value, RowFault):
        return value
    try:
        kind = formats.detect(value, job.source, job.task)
        if job.source.format == "auto" and job.format not in (None, kind):
            raise RowFault("mixed_schema", f"a row of the format {kind!r} among rows of the format {job.format!r}; "
                           "give the two kinds as two sources")
        if job.task == "pretrain":
            return formats.text_of(value, job.source)
        return lint.refuse(formats.chat_of(value, job.source, kind))
    except RowFault as fault:
        return fault


@contextlib.contextmanager
def writing(folder: Path) -> Iterator[None]:
    """A disk that is full or closed to us is nothing the data can be blamed for. Raises PreflightError."""
    try:
        yield
    except OSError as error:
        raise PreflightError(f"{folder}: tokenised data cannot be written there ({error.strerror or error}); what is "
                             "done is kept. Make room, or set SHARDWISE_CACHE to another folder") from None


@contextlib.contextmanager
def reading_back(folder: Path) -> Iterator[None]:
    """What a machine that went down has left half on its disk is no cache. Raises PreflightError."""
    try:
        yield
    except (OSError, ValueError, KeyError, EOFError, BadZipFile) as error:
        raise PreflightError(f"{folder}: tokenised data is damaged there ({error or type(error).__name__}); remove "
                             "that folder and start again") from None


def write(path: Path, values: np.ndarray) -> None:
    """`values.tofile(path)` does not notice when a full disk keeps the last of it out."""
    with open(path, "wb") as file:
        file.write(values.data)


def _publish(folder: Path, number: int, rows: Rows, keep_tokens: bool) -> None:
    """The index is renamed into place last and vouches for the rest."""
    empty = np.zeros(0, np.int32)
    write(folder / f"{number}.ids", np.concatenate([empty, *rows.ids]) if keep_tokens else empty)
    weights = np.concatenate([empty.astype(np.float32), *rows.weights])
    plain = bool(np.isin(weights, (0, 1)).all())
    write(folder / f"{number}.weights", (weights if keep_tokens else empty).astype(np.uint8 if plain else np.float32))
    table = np.asarray(rows.places, np.int64).reshape(-1, 2)
    index = {
        "length": np.asarray([len(ids) for ids in rows.ids], np.int32),
        "supervised": np.asarray([np.count_nonzero(w) for w in rows.weights], np.int32),
        "target_weight": np.asarray([w.sum(dtype=np.float64) for w in rows.weights], np.float64),
        "line": table[:, 0], "flags": table[:, 1].astype(np.uint8),
        "hash": np.asarray(rows.hashes, np.uint64)}
    facts = {"rows": rows.num_rows, "plain": plain, "faults": rows.faults, "faults_in_all": rows.faults_in_all}
    beside = folder / f"{number}.tmp.npz"
    np.savez(beside, facts=np.frombuffer(json.dumps(facts).encode(), np.uint8), **index)  # type: ignore[arg-type]
    os.replace(beside, folder / f"{number}.npz")
