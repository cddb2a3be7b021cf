"""Tokenise a source once: in parallel, outside any collective, going on where a killed start left off."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from shardwise.config.schema import SourceConfig
from shardwise.data.faults import RowFault
from shardwise.data.read import formats
from shardwise.data.read.files import DataFile
from shardwise.data.read.readers import Unit, read, units
from shardwise.data.store import worker
from shardwise.errors import DataError

BYTES_PER_WORKER = 4 << 20
"""Less than this is tokenised before a second process has started."""
MIN_PIECE, MAX_PIECE, PIECES_PER_FILE = 256 << 10, 4 << 20, 64
ROWS_LOOKED_AT = 1000
"""First rows of a source that may show its format."""
COLUMNS = ("length", "supervised", "target_weight", "line", "flags", "hash")


def build(folder: Path, files: Sequence[DataFile], job: worker.Job, workers: int | str) -> None:
    """Make the cache folder of a source. Raises DataError when it holds no row or a worker dies."""
    part = job.folder
    with worker.writing(part):
        part.mkdir(parents=True, exist_ok=True)
    planned = _planned(files)
    _run(planned, job, workers)
    with worker.writing(part):
        _assemble(part, planned, job)
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(part / "done", folder)
    shutil.rmtree(part, ignore_errors=True)


def _planned(files: Sequence[DataFile]) -> list[Unit]:
    planned = []
    with progress("looking for rows", sum(file.path.stat().st_size for file in files)) as bar:
        for file in files:
            for unit in units(file, bytes_per_unit=piece_size(file)):
                planned.append(unit)
                bar.update(unit.stop - unit.start)
    return planned


def piece_size(file: DataFile) -> int:
    """Bytes of a piece: small enough that the processes end together.

    It depends on the file alone, so a killed start goes on with the same pieces on any number of processes.
    """
    return min(MAX_PIECE, max(MIN_PIECE, file.path.stat().st_size // PIECES_PER_FILE))


def progress(what: str, size: int, *, by_all: bool = False) -> Any:
    """A bar on stderr for what takes more than two seconds; `size` in bytes.

    What every rank does at once (`by_all`) is shown by the first one of a node alone.
    """
    return tqdm(total=size, unit="B", unit_scale=True, unit_divisor=1024, desc=what, delay=2, dynamic_ncols=True,
                file=sys.stderr, disable=by_all and os.environ.get("LOCAL_RANK", "0") != "0")


def format_of(files: Sequence[DataFile], source: SourceConfig, task: str) -> str | None:
    """The format of the first row of the files that has one."""
    return first_format((row.value for file in files for unit in islice(units(file), 1) for row in read(unit)),
                        source, task)


def first_format(values: Iterable[dict[str, Any] | RowFault], source: SourceConfig, task: str) -> str | None:
    """The format of the first of these rows that has one."""
    for value in islice(values, ROWS_LOOKED_AT):
        if not isinstance(value, RowFault):
            with contextlib.suppress(RowFault):
                return formats.detect(value, source, task)
    return None


def _run(planned: list[Unit], job: worker.Job, workers: int | str) -> None:
    todo = [n for n in range(len(planned)) if not (job.folder / f"{n}.npz").is_file()]
    sizes = _sizes(planned)
    size = sum(sizes[n] for n in todo)
    count = min(len(todo), len(os.sched_getaffinity(0)) if workers == "auto" else int(workers))
    if workers == "auto" and size < 2 * BYTES_PER_WORKER:
        count = min(count, 1)
    with progress("tokenising", size) as bar:
        if job.source.limit is not None:
            done = _until(job.source.limit, planned, job)
        else:
            done = _here(todo, planned, job) if count <= 1 else _spread(todo, planned, job, count)
        for number in done:
            bar.update(sizes[number])


def _sizes(planned: list[Unit]) -> list[int]:
    """Bytes of each; those of a parquet file, which counts rows, share its size."""
    rows: Counter[str] = Counter()
    for unit in planned:
        rows[unit.file.shown] += unit.stop - unit.start
    return [unit.file.path.stat().st_size * (unit.stop - unit.start) // max(1, rows[unit.file.shown])
            for unit in planned]


def _until(limit: int, planned: list[Unit], job: worker.Job) -> Iterator[int]:
    """One after the other, to stop at the limit."""
    encoder, rows = job.encoder(), 0
    for number, unit in enumerate(planned):
        if rows >= limit:
            return
        index = job.folder / f"{number}.npz"
        rows += _facts(index)["rows"] if index.is_file() else worker.run(number, unit, job, encoder, limit - rows)
        yield number


def _here(todo: list[int], planned: list[Unit], job: worker.Job) -> Iterator[int]:
    encoder = job.encoder()
    for number in todo:
        worker.run(number, planned[number], job, encoder)
        yield number


def _spread(todo: list[int], planned: list[Unit], job: worker.Job, count: int) -> Iterator[int]:
    # Spawned, not forked: a fork of a process with threads (torch, tokenizers) may hang.
    pool = ProcessPoolExecutor(count, mp_context=get_context("spawn"), initializer=worker.start, initargs=(job,))
    try:
        # Held back until the processes have started, which takes them seconds; then they ignore them.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, worker.IGNORED)
        try:
            futures: dict[Future[int], int] = {pool.submit(worker.work, n, planned[n]): n for n in todo}
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        for future in as_completed(futures):
            future.result()
            yield futures[future]
    except BrokenProcessPool:
        raise DataError("a tokenising process died (out of memory, or killed); what is done is kept, start again to "
                        "go on, with fewer at once if memory is short (data.workers=1)") from None
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _facts(index: Path) -> dict[str, Any]:
    with worker.reading_back(index.parent), np.load(index) as columns:
        facts: dict[str, Any] = json.loads(columns["facts"].tobytes())
    return facts


def _first(faults: list[tuple[str, int, str]], kept: Counter[str]) -> list[tuple[str, int, str]]:
    """Those whose kind has not had its share yet: with millions of faulty rows they would not fit into memory."""
    first = []
    for fault in faults:
        kept[fault[0]] += 1
        if kept[fault[0]] <= worker.FAULTS_KEPT:
            first.append(fault)
    return first


def _assemble(part: Path, planned: list[Unit], job: worker.Job) -> None:
    """Join the units' files, in order, into the folder that is published."""
    done = part / "done"
    shutil.rmtree(done, ignore_errors=True)
    done.mkdir()
    made = [n for n in range(len(planned)) if (part / f"{n}.npz").is_file()]
    kept_faults: Counter[str] = Counter()
    facts = []
    for n in made:
        fact = _facts(part / f"{n}.npz")
        facts.append({**fact, "faults": _first(fact["faults"], kept_faults)})
    plain = all(fact["plain"] for fact in facts)
    shown = list(dict.fromkeys(unit.file.shown for unit in planned))
    number_of = {name: n for n, name in enumerate(shown)}
    columns: dict[str, list[np.ndarray]] = {name: [] for name in (*COLUMNS, "file_number")}
    counts: Counter[str] = Counter()
    faults: list[dict[str, Any]] = []
    with open(done / "ids", "wb") as ids, open(done / "weights", "wb") as weights:
        for number, fact in zip(made, facts, strict=True):
            file = planned[number].file.shown
            with open(part / f"{number}.ids", "rb") as unit_ids:
                shutil.copyfileobj(unit_ids, ids)
            kept = np.fromfile(part / f"{number}.weights", np.uint8 if fact["plain"] else np.float32)
            weights.write(kept.astype(np.uint8 if plain else np.float32, copy=False).data)
            with np.load(part / f"{number}.npz") as index:
                for name in COLUMNS:
                    columns[name].append(index[name])
                columns["file_number"].append(np.full(len(index["line"]), number_of[file], np.int32))
            counts.update(fact["faults_in_all"])
            faults += [{"kind": kind, "place": f"{file}:{line}", "text": text} for kind, line, text in fact["faults"]]
    np.savez(done / "index.npz", **{name: np.concatenate(parts or [np.zeros(0)])  # type: ignore[arg-type]
                                    for name, parts in columns.items()})
    (done / "facts.json").write_text(json.dumps({
        "rows": sum(fact["rows"] for fact in facts), "plain": plain, "files": shown, "faults": faults,
        "counts": counts, "kept": job.keep_tokens}))
