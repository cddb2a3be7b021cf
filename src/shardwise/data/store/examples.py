"""The examples of one side of a run (training, or held out), over all its sources, by number."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from shardwise.data.store.cached import CachedSource


@dataclass(frozen=True)
class Examples:
    """n tokenised examples; tokens stay on disk, what is needed to plan steps is in memory (40 bytes each)."""

    sources: tuple[CachedSource, ...]
    source: np.ndarray
    """int16 [n]: which of `sources` an example is in."""
    row: np.ndarray
    """int64 [n]: its number there; for a pretraining block, that of the document it begins in."""
    begin: np.ndarray
    """int64 [n]: where its tokens begin there."""
    lengths: np.ndarray
    """int32 [n], tokens."""
    supervised: np.ndarray
    """int32 [n], tokens that carry loss."""
    target_weight: np.ndarray
    """float64 [n], sum of the loss weights; equal to `supervised` unless the data has weights of its own."""
    parts: tuple[tuple[int, float], ...]
    """(examples, weight) of each source, in order."""
    counts: dict[str, Any]
    """rows, examples, tokens, supervised_tokens, truncated, split, and `dropped` rows by kind of fault."""
    fingerprint: str

    def __len__(self) -> int:
        return len(self.lengths)

    def get(self, ids: Sequence[int]) -> list[tuple[np.ndarray, np.ndarray]]:
        """(token ids int32 [T], loss weights float32 [T]) of each example, in the order asked for."""
        return [self._one(int(i)) for i in ids]

    def _one(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        source = self.sources[self.source[i]]
        where = slice(int(self.begin[i]), int(self.begin[i]) + int(self.lengths[i]))
        weights = source.weights[where].astype(np.float32)
        weights[:1] = 0  # nothing precedes the first token
        return source.ids[where], weights

    def place(self, i: int) -> str:
        """FILE:LINE the example came from."""
        source: CachedSource = self.sources[self.source[i]]
        return source.place(int(self.row[i]))

    def column(self, name: str) -> np.ndarray:
        """A column of the sources' indices, [n]."""
        if not len(self):
            return np.zeros(0, np.int64)
        return np.concatenate([source.index[name][self.row[self.source == number]]
                               for number, source in enumerate(self.sources)])

    def without(self, left_out: np.ndarray, kind: str) -> Examples:
        """All but those where `left_out` (bool [n]) is set, which are counted as dropped for `kind`."""
        if not left_out.any():
            return self
        keep = ~left_out
        kept = {name: getattr(self, name)[keep]
                for name in ("source", "row", "begin", "lengths", "supervised", "target_weight")}
        sizes = np.bincount(kept["source"], minlength=len(self.sources))
        parts = tuple((int(size), weight) for size, (_, weight) in zip(sizes, self.parts, strict=True))
        dropped = {**self.counts["dropped"], kind: int(left_out.sum())}
        counts = {**self.counts, **_sums(kept["lengths"], kept["supervised"]), "dropped": dropped}
        mark = hashlib.sha256(f"{self.fingerprint} {np.flatnonzero(left_out).tolist()}".encode()).hexdigest()[:32]
        return replace(self, **kept, parts=parts, counts=counts, fingerprint=mark)


def chats(sources: Sequence[CachedSource], weights: Sequence[float]) -> Examples:
    """One example for each row of the sources' indices."""
    return _joined(sources, weights, [
        (np.arange(len(s.starts) - 1), s.starts[:-1], s.index["length"], s.index["supervised"],
         s.index["target_weight"]) for s in sources], 0)


def blocks(sources: Sequence[CachedSource], weights: Sequence[float], length: int) -> Examples:
    """Each source as one stream of its documents, cut into blocks of `length` tokens; the last is shorter.

    A block may hold several documents, each ended by EOS, and attention runs across them, as is usual in
    pretraining: the label after an EOS is the next document's first token. Only a last block of one token is
    left out (nothing precedes it to predict it from) and counted.
    """
    made, lost = [], 0
    for source in sources:
        total = int(source.starts[-1])
        begin = np.arange(0, total, length, dtype=np.int64)
        size = np.minimum(length, total - begin).astype(np.int32)
        lost += int((size < 2).sum())
        begin, size = begin[size > 1], size[size > 1]
        # Documents without a token share their start with the next one; the last of those is the one that begins there.
        document = np.searchsorted(source.starts[:-1], begin, side="right") - 1
        made.append((document, begin, size, size - 1, (size - 1).astype(np.float64)))
    return _joined(sources, weights, made, lost)


def _joined(sources: Sequence[CachedSource], weights: Sequence[float], made: Sequence[tuple[np.ndarray, ...]],
            tokens_lost: int) -> Examples:
    row, begin, lengths, supervised, target_weight = (np.concatenate(column) for column in zip(*made, strict=True))
    sizes = [len(columns[0]) for columns in made]
    counts = {"rows": sum(source.facts["rows"] for source in sources), **_sums(lengths, supervised),
              "truncated": 0, "split": 0, "tokens_lost": tokens_lost, "dropped": {}}
    mark = hashlib.sha256(" ".join(source.content for source in sources).encode()).hexdigest()[:32]
    return Examples(
        sources=tuple(sources), source=np.repeat(np.arange(len(sources), dtype=np.int16), sizes),
        row=row.astype(np.int64), begin=begin.astype(np.int64), lengths=lengths.astype(np.int32),
        supervised=supervised.astype(np.int32), target_weight=target_weight.astype(np.float64),
        parts=tuple(zip(sizes, weights, strict=True)), counts=counts, fingerprint=mark)


def _sums(lengths: np.ndarray, supervised: np.ndarray) -> dict[str, int]:
    return {"examples": len(lengths), "tokens": int(lengths.sum(dtype=np.int64)),
            "supervised_tokens": int(supervised.sum(dtype=np.int64))}
