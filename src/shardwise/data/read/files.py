"""The files behind a source: one, a folder of them, a glob, a `demo:` name, or a hub data set as a local file."""

from __future__ import annotations

import difflib
import glob
import hashlib
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from shardwise import demo
from shardwise.config.schema import SourceConfig
from shardwise.errors import DataError

KINDS = {".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "json", ".csv": "csv", ".tsv": "csv",
         ".txt": "text", ".md": "text", ".rst": "text", ".parquet": "parquet"}
_KNOWN = f"known: {' '.join(KINDS)}, and .gz behind all but .parquet"
_OTHER_PACKERS = (".zst", ".bz2", ".xz", ".lz4", ".zip", ".gz")
_CHUNK = 8 << 20


class DataFile(NamedTuple):
    """One file to read rows from."""

    path: Path
    shown: str
    """What the address of a row calls it."""
    kind: str
    """jsonl, json, parquet, csv or text."""
    gz: bool
    """Packed with gzip."""


def files_of(source: SourceConfig) -> list[DataFile]:
    """All files of a source, sorted by path. Raises DataError where there are none or one cannot be used."""
    if source.hub is not None:
        from shardwise.data.read import hub

        return [DataFile(hub.exported(source), f"{source.hub}[{source.split}]", "parquet", False)]
    name = os.path.expanduser(demo.resolve(source.path or ""))
    path = Path(name)
    if not name:  # else it would mean the whole working folder
        raise DataError("a source has neither path nor hub; name a file, a folder, a glob or a hub data set")
    if path.is_dir():
        return _in_folder(path)
    if path.exists():
        return [_data_file(path)]
    if glob.has_magic(name):
        found = sorted({path for path in map(Path, glob.iglob(name, recursive=True)) if not path.is_dir()})
        if not found:
            raise DataError(f"{name}: matches no file (from {Path.cwd()}); `**` reaches into folders")
        return [_data_file(path) for path in found]
    raise DataError(f"{name}: no such file or folder (from {Path.cwd()}){_near(path)}")


def digest(file: DataFile, advance: Callable[[int], object] = lambda size: None) -> str:
    """SHA-256 over the SHA-256 of each 8 MiB of the content: two cores share a large file, memory stays flat.

    `advance` is told how many bytes are done.
    """
    descriptor = os.open(file.path, os.O_RDONLY)
    try:
        starts = range(0, max(os.fstat(descriptor).st_size, 1), _CHUNK)
        with ThreadPoolExecutor(2) as pool:
            whole = hashlib.sha256()
            for part in pool.map(lambda start: _chunk_digest(descriptor, start), starts):
                whole.update(part)
                advance(_CHUNK)
            return whole.hexdigest()
    finally:
        os.close(descriptor)


def _chunk_digest(descriptor: int, start: int) -> bytes:
    result, at = hashlib.sha256(), start
    while part := os.pread(descriptor, min(1 << 20, start + _CHUNK - at), at):
        result.update(part)
        at += len(part)
    return result.digest()


def _kind_of(path: Path) -> tuple[str, bool] | None:
    """(kind, packed) by the suffixes, upper case or lower; None for a file that is none of ours."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    packed = suffixes[-1:] == [".gz"]
    kind = KINDS.get(suffixes[-2] if packed and len(suffixes) > 1 else suffixes[-1] if suffixes else "")
    return None if kind is None or (packed and kind == "parquet") else (kind, packed)


def _data_file(path: Path) -> DataFile:
    kind = _kind_of(path)
    if kind is None:
        raise DataError(f"{path}: unknown kind of file {path.suffix!r}; {_KNOWN}")
    if not path.is_file():
        raise DataError(f"{path}: not a regular file")
    if not os.access(path, os.R_OK):
        raise DataError(f"{path}: this user may not read it")
    return DataFile(path, str(path), *kind)


def _in_folder(folder: Path) -> list[DataFile]:
    found = []
    for path in sorted(_visible_files(folder)):
        if _kind_of(path):
            found.append(_data_file(path))
        elif path.suffix.lower() in _OTHER_PACKERS and path.with_suffix("").suffix.lower() in KINDS:
            raise DataError(f"{path}: data packed in a way that is not read here; {_KNOWN}. Unpack it or move it away")
    if not found:
        raise DataError(f"{folder}: no data file in this folder; {_KNOWN}")
    return found


def _visible_files(folder: Path) -> Iterator[Path]:
    seen = set()
    for place, folders, names in os.walk(folder, followlinks=True):
        real = os.path.realpath(place)
        if real in seen:  # a link back up
            folders.clear()
            continue
        seen.add(real)
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield from (Path(place, name) for name in names if not name.startswith("."))


def _near(path: Path) -> str:
    """The most similar names where the path first leaves what exists."""
    while not path.parent.exists():
        path = path.parent
    try:
        names = sorted(os.listdir(path.parent))
    except OSError:
        return ""
    near = difflib.get_close_matches(path.name, names, n=3, cutoff=0.6)
    return f"; did you mean {' or '.join(str(path.parent / name) for name in near)}?" if near else ""
