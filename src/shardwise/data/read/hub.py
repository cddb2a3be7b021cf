"""A Hugging Face data set as one local parquet file."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from filelock import FileLock
from tqdm import tqdm

from shardwise.config.cache import cache_root
from shardwise.config.schema import SourceConfig
from shardwise.errors import DataError

_ROWS_AT_ONCE = 1000


def exported(source: SourceConfig) -> Path:
    """The file with the rows of a `hub` source, written on first use and kept under the data set's fingerprint.

    Any number of processes may ask at once: one writes, the others wait. Raises DataError where the data set
    cannot be loaded.
    """
    dataset = opened(source)
    parts = [source.hub, source.subset, source.split, dataset._fingerprint]
    key = hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:24]
    path = cache_root() / "hub" / key / "rows.parquet"
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.is_file():
        with FileLock(path.with_suffix(".lock")):
            if not path.is_file():
                _export(dataset, path)
    return path


def opened(source: SourceConfig, *, streaming: bool = False) -> Any:
    """The data set itself, fetched or to be read over the network. Raises DataError where it cannot be loaded."""
    import datasets

    with explained(source):
        return datasets.load_dataset(source.hub, source.subset, split=source.split, streaming=streaming)


@contextlib.contextmanager
def explained(source: SourceConfig) -> Iterator[None]:
    """Within: whatever the library raises becomes a DataError that names the source."""
    try:
        yield
    except Exception as error:  # it raises many kinds
        cause = " ".join(f"{type(error).__name__}: {error}".split())[:500]
        way_out = "; for a folder of data files use path: in place of hub:" if os.path.isdir(source.hub or "") else ""
        raise DataError(f"hub data set {source.hub!r}, subset {source.subset!r}, split {source.split!r}: "
                        f"{cause}{way_out}") from None


def _export(dataset: Any, path: Path) -> None:
    import pyarrow.parquet as pq

    fresh = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        with pq.ParquetWriter(fresh, dataset.features.arrow_schema) as writer:
            rows = dataset.with_format("arrow").iter(batch_size=_ROWS_AT_ONCE)  # never all rows at once
            for table in tqdm(rows, total=-(-len(dataset) // _ROWS_AT_ONCE), unit="k rows", desc="copying", delay=2,
                              dynamic_ncols=True):
                writer.write_table(table.cast(dataset.features.arrow_schema))
        with fresh.open("rb") as file:
            os.fsync(file.fileno())
        fresh.replace(path)  # what exists under the name is complete
    finally:
        fresh.unlink(missing_ok=True)
