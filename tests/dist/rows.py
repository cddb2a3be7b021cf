"""Examples given as numbers, (token ids, supervised flags), in place of the store's."""

from __future__ import annotations

from typing import Any

import numpy as np

from shardwise.data.store import Examples


class Table(list):
    """Rows addressed as the store's table is."""

    def __getitem__(self, which: Any) -> Any:
        if isinstance(which, int):
            return {"place": f"rows:{which + 1}"}
        rows = [list.__getitem__(self, i) for i in which]
        return {"ids": [np.asarray(ids, np.int32) for ids, _ in rows],
                "supervised": [np.asarray(supervised, np.int8) for _, supervised in rows]}


def examples_of(rows: list[tuple[list[int], list[int]]]) -> Examples:
    """What the store would hold for these rows."""
    lengths = np.asarray([len(ids) for ids, _ in rows], np.int32)
    supervised = np.asarray([sum(flags[1:]) for _, flags in rows], np.int32)
    counts = {"rows": len(rows), "examples": len(rows), "dropped_too_long": 0, "truncated": 0,
              "dropped_without_target": 0, "tokens": int(lengths.sum()), "supervised_tokens": int(supervised.sum())}
    return Examples(table=Table(rows), lengths=lengths, supervised=supervised, counts=counts, fingerprint="rows")
