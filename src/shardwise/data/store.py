"""Tokenise once, keep on disk under a key of everything that matters, open memory-mapped ever after."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock

from shardwise import __version__
from shardwise.config.cache import cache_root
from shardwise.config.schema import DataConfig, SourceConfig
from shardwise.data.encode import ChatEncoder, Encoded, text_ids
from shardwise.data.sources import RawRow, local_path, raw_rows, text_of
from shardwise.errors import DataError

FORMAT = 1
"""Raise when the meaning of cached examples changes."""
ROWS_PER_BATCH = 256
ROWS_PER_PROCESS = 2000
"""Fewer rows than this are tokenised faster than a second process starts."""


@dataclass(frozen=True)
class Examples:
    """Tokenised examples on disk. `lengths`, `supervised`: int32 [n], tokens and target tokens of each."""

    table: Any
    lengths: np.ndarray
    supervised: np.ndarray
    counts: dict[str, int]
    """rows, examples, dropped_too_long, truncated, dropped_without_target, tokens, supervised_tokens."""
    fingerprint: str

    def __len__(self) -> int:
        return len(self.lengths)

    def get(self, ids: list[int]) -> list[tuple[np.ndarray, np.ndarray]]:
        """(token ids, supervised flags) of each example, in the order asked for."""
        rows = self.table[ids]
        return list(zip(rows["ids"], rows["supervised"], strict=True))

    def place(self, index: int) -> str:
        """FILE:LINE the example came from."""
        return str(self.table[index]["place"])


def load_examples(sources: tuple[SourceConfig, ...], data: DataConfig, tokenizer: Any) -> Examples:
    """Open the examples of these sources, tokenising them first if no cache fits.

    Every rank may call it at once: one does the work under a file lock, outside any collective, the others
    wait and then read. Raises DataError for rows that cannot be trained on as asked.
    """
    key = _fingerprint(sources, data, tokenizer)
    folder = cache_root() / "tokenised" / key
    folder.parent.mkdir(parents=True, exist_ok=True)
    if not (folder / "counts.json").is_file():
        with FileLock(f"{folder}.lock"):
            if not (folder / "counts.json").is_file():
                _build(folder, sources, data, tokenizer)
    return _open(folder, key)


def _open(folder: Path, key: str) -> Examples:
    import datasets

    table = datasets.load_from_disk(str(folder / "table"))
    columns = {name: table.data.column(name).to_numpy() for name in ("length", "num_supervised")}
    return Examples(table=table.with_format("numpy", columns=["ids", "supervised", "place"]),
                    lengths=columns["length"], supervised=columns["num_supervised"],
                    counts=json.loads((folder / "counts.json").read_text()), fingerprint=key)


def _build(folder: Path, sources: tuple[SourceConfig, ...], data: DataConfig, tokenizer: Any) -> None:
    import datasets

    beside = folder.with_name(folder.name + ".part")
    shutil.rmtree(beside, ignore_errors=True)
    rows = list(raw_rows(sources))
    if not rows:
        raise DataError("the data holds no row at all")
    work = partial(_chat_batch if data.task == "sft" else _text_batch, data=data, tokenizer=tokenizer,
                   template=_template(data))
    processes = min(len(os.sched_getaffinity(0)), len(rows) // ROWS_PER_PROCESS)
    raw = datasets.Dataset.from_dict({"raw": [r.raw for r in rows], "kind": [r.kind for r in rows],
                                      "place": [r.place for r in rows]})
    small = len(rows) < ROWS_PER_PROCESS
    if small:  # done before a bar could be read
        datasets.disable_progress_bars()
    table = raw.map(work, batched=True, batch_size=ROWS_PER_BATCH, num_proc=processes if processes > 1 else None,
                    remove_columns=raw.column_names, desc="tokenising", load_from_cache_file=False,
                    keep_in_memory=small)
    datasets.enable_progress_bars()
    table, dropped = (_usable(table, len(rows)) if data.task == "sft" else _blocks(table, data.max_length))
    counts = {"rows": len(rows), "examples": len(table), **dropped,
              "tokens": int(np.sum(table.data.column("length").to_numpy())),
              "supervised_tokens": int(np.sum(table.data.column("num_supervised").to_numpy()))}
    _refuse_senseless(counts, data)
    table.flatten_indices().save_to_disk(str(beside / "table"))
    (beside / "counts.json").write_text(json.dumps(counts))
    shutil.rmtree(folder, ignore_errors=True)
    os.replace(beside, folder)


def _refuse_senseless(counts: dict[str, int], data: DataConfig) -> None:
    if counts["examples"] == 0:
        raise DataError(f"no usable example is left of {counts['rows']} rows "
                        f"({counts['dropped_too_long']} longer than data.max_length={data.max_length})")
    if data.task == "sft" and counts["supervised_tokens"] >= counts["tokens"]:
        raise DataError("every token is supervised, which response-only training never means; "
                        "check the chat template")


def _chat_batch(batch: dict[str, list[Any]], *, data: DataConfig, tokenizer: Any,
                template: str | None) -> dict[str, list[Any]]:
    encoder = ChatEncoder(tokenizer, template=template, supervise=data.supervise)
    rows = [RawRow(*fields) for fields in zip(batch["raw"], batch["kind"], batch["place"], strict=True)]
    fate, kept = [], []
    for row, encoded in zip(rows, encoder(rows), strict=True):
        state, encoded = _fitted(encoded, data, row.place)
        fate.append(state)
        kept.append(encoded)
    return {**_columns(kept), "place": batch["place"], "fate": fate}


def _fitted(encoded: Encoded, data: DataConfig, place: str) -> tuple[str, Encoded]:
    if len(encoded.ids) <= data.max_length:
        return "whole", encoded
    if data.on_too_long == "error":
        raise DataError(f"{place}: {len(encoded.ids)} tokens, more than data.max_length={data.max_length}; "
                        "raise it, or set data.on_too_long=drop or truncate")
    if data.on_too_long == "drop":
        return "dropped_too_long", Encoded([], [])
    cut = Encoded(encoded.ids[:data.max_length], encoded.supervised[:data.max_length])
    return ("truncated", cut) if any(cut.supervised[1:]) else ("dropped_without_target", Encoded([], []))


def _columns(kept: list[Encoded]) -> dict[str, list[Any]]:
    # The first token of an example has nothing before it to be predicted from, so it is never a target.
    return {"ids": [np.asarray(e.ids, np.int32) for e in kept],
            "supervised": [np.asarray(e.supervised, np.int8) for e in kept],
            "length": [np.int32(len(e.ids)) for e in kept],
            "num_supervised": [np.int32(sum(e.supervised[1:])) for e in kept]}


def _usable(table: Any, rows: int) -> tuple[Any, dict[str, int]]:
    fates = np.asarray(table.data.column("fate").to_pylist())
    dropped = {fate: int(np.sum(fates == fate))
               for fate in ("dropped_too_long", "dropped_without_target", "truncated")}
    keep = np.flatnonzero(table.data.column("num_supervised").to_numpy() > 0)
    dropped["dropped_without_target"] = rows - len(keep) - dropped["dropped_too_long"]
    return table.select(keep).remove_columns("fate"), dropped


def _text_batch(batch: dict[str, list[Any]], *, data: DataConfig, tokenizer: Any,
                template: str | None) -> dict[str, list[Any]]:
    rows = [RawRow(*fields) for fields in zip(batch["raw"], batch["kind"], batch["place"], strict=True)]
    ids = text_ids(tokenizer, [text_of(row) for row in rows])
    return {"ids": [np.asarray(document, np.int32) for document in ids], "place": batch["place"]}


def _blocks(table: Any, length: int) -> tuple[Any, dict[str, int]]:
    """One stream of all documents, cut into blocks of `length` tokens; the tail is a shorter block.

    A block may hold several documents, each ended by EOS, and attention runs across them, as is usual in
    pretraining. Only a tail of one token is dropped: nothing precedes it to predict it from.
    """
    import datasets

    def generate() -> Iterator[dict[str, Any]]:
        pending: list[np.ndarray] = []
        held, place = 0, ""
        for row in table.with_format("numpy"):
            place = place or str(row["place"])
            pending.append(row["ids"])
            held += len(row["ids"])
            if held < length:
                continue
            stream = np.concatenate(pending)
            for start in range(0, held - held % length, length):
                yield _block(stream[start:start + length], place)
            pending, held = [stream[held - held % length:]], held % length
            place = str(row["place"]) if held else ""
        if held > 1:
            yield _block(np.concatenate(pending), place)

    blocks = list(generate())
    built = datasets.Dataset.from_dict({key: [b[key] for b in blocks] for key in blocks[0]}) if blocks else table
    total = sum(len(row) for row in table.with_format("numpy")["ids"])
    short = total - sum(int(b["length"]) for b in blocks)
    return built, {"dropped_too_long": 0, "dropped_without_target": short, "truncated": 0}


def _block(ids: np.ndarray, place: str) -> dict[str, Any]:
    return {"ids": ids.astype(np.int32), "supervised": np.ones(len(ids), np.int8), "place": place,
            "length": np.int32(len(ids)), "num_supervised": np.int32(len(ids) - 1)}


def _template(data: DataConfig) -> str | None:
    if data.chat_template is None:
        return None
    try:
        return Path(data.chat_template).read_text(encoding="utf-8")
    except OSError as error:
        raise DataError(f"data.chat_template={data.chat_template}: {error}") from None


def _fingerprint(sources: tuple[SourceConfig, ...], data: DataConfig, tokenizer: Any) -> str:
    digest = hashlib.sha256()
    options = replace(data, train=(), eval=(), packing="auto")
    template = _template(data) or (tokenizer.chat_template if data.task == "sft" else "")
    if data.task == "sft" and not template:
        raise DataError(f"the tokenizer {tokenizer.name_or_path!r} has no chat template; "
                        "give one with data.chat_template=FILE.jinja")
    for part in (f"{__version__} {FORMAT}", repr(options), repr(template), tokenizer.backend_tokenizer.to_str(),
                 repr(sorted(tokenizer.special_tokens_map.items()))):
        digest.update(hashlib.sha256(part.encode()).digest())
    for source in sources:
        digest.update(repr(source).encode())
        if source.hub is None:
            with open(local_path(source), "rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()[:32]
