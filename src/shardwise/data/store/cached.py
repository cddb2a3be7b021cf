"""A source as it lies in the cache: opened without reading it, under a key of everything that matters."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock

from shardwise import __version__
from shardwise.config.cache import cache_root
from shardwise.config.schema import DataConfig, SourceConfig
from shardwise.data.read.files import DataFile, digest, files_of
from shardwise.data.store import worker
from shardwise.data.store.build import build, format_of, progress
from shardwise.data.store.worker import reading_back, writing
from shardwise.errors import DataError

FORMAT = 3
"""Raise when the meaning of cached examples changes."""


@dataclass(frozen=True)
class CachedSource:
    """Flat arrays of all examples of a source (of all documents, for pretraining)."""

    content: str
    """Fingerprint of the rows and of all that shapes their ids and weights; not of where the files lie."""
    ids: np.ndarray
    """int32 [tokens], memory-mapped."""
    weights: np.ndarray
    """uint8 or float32 [tokens], memory-mapped."""
    starts: np.ndarray
    """int64 [n + 1]: where each example begins in the two above."""
    index: dict[str, np.ndarray]
    """[n] each: length, supervised, target_weight, line, file_number, flags (bits of rows.FLAGS), hash."""
    facts: dict[str, Any]
    """rows, files, faults (kind, place, text; the first of each kind), counts (all faults by kind)."""

    def place(self, example: int) -> str:
        """FILE:LINE."""
        return f"{self.facts['files'][self.index['file_number'][example]]}:{self.index['line'][example]}"


def open_source(source: SourceConfig, data: DataConfig, tokenizer: Any, *, keep_tokens: bool = True) -> CachedSource:
    """Open a source, tokenising it first if no cache fits. Without `keep_tokens` only the index is kept.

    Every rank may call it at once: one does the work under a file lock, outside any collective, the others
    wait and then read. Raises DataError for what makes the source as a whole unusable.
    """
    files = files_of(source)
    template = chat_template(data, tokenizer)
    content = _content(files, source, data, tokenizer, template)
    # Row addresses are kept too, so the same rows under another name are another folder.
    key = _digest([content, *(file.shown for file in files), "" if keep_tokens else "counted"])
    folder = cache_root() / "tokenised" / key
    if not (folder / "facts.json").is_file():
        with contextlib.ExitStack() as held:
            with writing(folder.parent):
                folder.parent.mkdir(parents=True, exist_ok=True)
                held.enter_context(FileLock(f"{folder}.lock"))
            if not (folder / "facts.json").is_file():
                job = worker.job(source, data, tokenizer, template=template,
                                 format=format_of(files, source, data.task),
                                 folder=folder.with_name(f"{key}.part"), keep_tokens=keep_tokens)
                build(folder, files, job, data.workers)
    opened = _opened(folder, content)
    if opened.facts["rows"] == 0:
        more = f" and {len(files) - 3:,} more files" if len(files) > 3 else ""
        raise DataError(f"{', '.join(file.shown for file in files[:3])}{more}: 0 rows; there is nothing in it")
    return opened


def _opened(folder: Path, content: str) -> CachedSource:
    with reading_back(folder):
        facts = json.loads((folder / "facts.json").read_text(encoding="utf-8"))
        with open(folder / "index.npz", "rb") as file, np.load(file) as arrays:
            index = dict(arrays)
        starts = np.zeros(len(index["length"]) + 1, np.int64)
        np.cumsum(index["length"], out=starts[1:])
        ids = _mapped(folder / "ids", np.int32)
        weights = _mapped(folder / "weights", np.uint8 if facts["plain"] else np.float32)
        if facts["kept"] and not starts[-1] == len(ids) == len(weights):
            raise ValueError(f"{starts[-1]:,} tokens were written, {len(ids):,} are there")
    return CachedSource(content=content, ids=ids, weights=weights, starts=starts, index=index, facts=facts)


def _mapped(path: Path, dtype: Any) -> np.ndarray:
    return np.memmap(path, dtype, "r") if path.stat().st_size else np.zeros(0, dtype)


def chat_template(data: DataConfig, tokenizer: Any) -> str | None:
    """The text of `data.chat_template`; None for the tokenizer's own. Raises DataError when there is neither."""
    if data.task == "pretrain":
        return None
    if data.chat_template is not None:
        try:
            return Path(data.chat_template).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"data.chat_template={data.chat_template}: {error}") from None
    if not tokenizer.chat_template:
        raise DataError(f"the tokenizer {tokenizer.name_or_path!r} has no chat template; "
                        "give one with data.chat_template=FILE.jinja")
    return None


def _content(files: Sequence[DataFile], source: SourceConfig, data: DataConfig, tokenizer: Any,
             template: str | None) -> str:
    own = template if template is not None else (tokenizer.chat_template if data.task == "sft" else "")
    # Documents are kept whole and cut into blocks when opened, so their length does not enter.
    options = () if data.task == "pretrain" else (data.supervise, data.max_length, data.on_too_long)
    with progress("reading", sum(file.path.stat().st_size for file in files), by_all=True) as bar:
        rows = [f"{file.kind} {digest(file, bar.update)}" for file in files]
    return _digest([
        f"{__version__} {FORMAT}", repr((data.task, *options)), repr(own), _backend(tokenizer),
        repr(sorted(tokenizer.special_tokens_map.items())),
        repr((source.format, source.columns, source.roles, source.limit)),
        *rows])


def _backend(tokenizer: Any) -> str:
    """The vocabulary and its rules; without padding and truncation, which encoders turn off in the same object."""
    parts: dict[str, Any] = json.loads(tokenizer.backend_tokenizer.to_str())
    return json.dumps({**parts, "padding": None, "truncation": None}, sort_keys=True)


def _digest(parts: Sequence[str]) -> str:
    whole = hashlib.sha256()
    for part in parts:
        whole.update(hashlib.sha256(part.encode()).digest())
    return whole.hexdigest()[:32]
