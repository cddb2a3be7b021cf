"""Examples given as numbers, (token ids, loss weights), in place of the store's."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np


class Rows:
    """Answers as the store's Examples do, from rows in memory; `parts` as one source of weight 1."""

    fingerprint = "rows"

    def __init__(self, rows: Sequence[tuple[Sequence[int], Sequence[float]]]) -> None:
        self.rows = [(np.asarray(ids, np.int32), np.asarray([0, *weights[1:]], np.float32)) for ids, weights in rows]
        self.lengths = np.asarray([len(ids) for ids, _ in self.rows], np.int32)
        self.supervised = np.asarray([(weights > 0).sum() for _, weights in self.rows], np.int32)
        self.target_weight = np.asarray([weights.sum(dtype=np.float64) for _, weights in self.rows])
        self.parts = ((len(rows), 1.0),)
        self.sources = [SimpleNamespace(facts={"rows": len(rows)}, content=self.fingerprint)]
        self.counts = {"rows": len(rows), "examples": len(rows), "tokens": int(self.lengths.sum()),
                       "supervised_tokens": int(self.supervised.sum()), "truncated": 0, "split": 0, "split_lost": 0,
                       "tokens_lost": 0, "dropped": {}}

    def __len__(self) -> int:
        return len(self.rows)

    def get(self, ids: list[int]) -> list[tuple[np.ndarray, np.ndarray]]:
        return [self.rows[i] for i in ids]

    def place(self, index: int) -> str:
        return f"rows:{index + 1}"


def examples_of(rows: Sequence[tuple[Sequence[int], Sequence[float]]]) -> Any:
    """What the store would hold for these rows."""
    return Rows(rows)
