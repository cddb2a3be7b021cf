"""What was found wrong with the data, kind by kind, and what the policy makes of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from shardwise.config.schema import DataConfig
from shardwise.data.faults import KINDS
from shardwise.data.rows import FLAGS
from shardwise.data.store.examples import Examples
from shardwise.errors import DataError

PLACES_KEPT = 1000
PLACES_SHOWN = 5


@dataclass(frozen=True)
class Finding:
    """One kind of fault on one side of the data."""

    side: str
    """train or eval."""
    kind: str
    """A key of KINDS."""
    count: int
    """Rows with it."""
    policy: str
    """error, drop or report."""
    rows: list[tuple[str, str]]
    """(FILE:LINE, what is wrong) of the first of them."""


def policy_of(kind: str, data: DataConfig) -> str:
    """What the settings say about a kind of fault."""
    if kind == "too_long":
        return "error" if data.on_too_long == "error" else "drop"
    policy: str = getattr(data.on_fault, kind)
    return policy


def row_findings(side: str, examples: Examples, data: DataConfig) -> Iterator[Finding]:
    """Faults that made rows unusable, and those noted on examples."""
    for kind in KINDS:
        count = sum(source.facts["counts"].get(kind, 0) for source in examples.sources)
        rows = [(fault["place"], fault["text"]) for source in examples.sources for fault in source.facts["faults"]
                if fault["kind"] == kind]
        if count:
            yield Finding(side, kind, count, policy_of(kind, data), rows[:PLACES_KEPT])
    flags = examples.column("flags")
    for bit, kind in enumerate(FLAGS):
        if kind in KINDS:
            yield from _of(side, kind, (flags >> bit) & 1 == 1, examples, data)


def duplicates(side: str, examples: Examples, data: DataConfig) -> Iterator[Finding]:
    """Examples whose ids an earlier one has."""
    again = repeated(examples)
    if again.any():
        marks = examples.column("hash")
        yield from _of(side, "duplicate", again, examples, data,
                       lambda i: f"the same as {examples.place(int(np.argmax(marks == marks[i])))}")


def repeated(examples: Examples) -> np.ndarray:
    """bool [n]: the same ids as an earlier example."""
    _, first = np.unique(examples.column("hash"), return_index=True)
    again = np.ones(len(examples), bool)
    again[first] = False
    return again


def overlap(train: Examples, held_out: Examples) -> np.ndarray:
    """bool [n of held_out]: the same ids as a training example."""
    return np.isin(held_out.column("hash"), train.column("hash"))


def overlaps(train: Examples, held_out: Examples, data: DataConfig) -> Iterator[Finding]:
    """Evaluation examples that are also in training."""
    shared = overlap(train, held_out)
    if shared.any():
        trained, marks = train.column("hash"), held_out.column("hash")
        yield from _of("eval", "eval_overlap", shared, held_out, data,
                       lambda i: f"also in training: {train.place(int(np.argmax(trained == marks[i])))}")


def _of(side: str, kind: str, which: np.ndarray, examples: Examples, data: DataConfig,
        text: Any = None) -> Iterator[Finding]:
    if which.any():
        first = np.flatnonzero(which)[:PLACES_KEPT]
        rows = [(examples.place(int(i)), KINDS[kind].meaning if text is None else text(i)) for i in first]
        yield Finding(side, kind, int(which.sum()), policy_of(kind, data), rows)


def refuse(findings: Iterable[Finding]) -> None:
    """Raises DataError that lists every kind whose policy is `error`, with rows and the way out."""
    bad = [finding for finding in findings if finding.policy == "error"]
    if bad:
        raise DataError("\n".join(["the data cannot be trained on as it is:", *map(described, bad)]))


def described(finding: Finding) -> str:
    """A finding in a few lines."""
    shown = [f"    {place}: {text}" for place, text in finding.rows[:PLACES_SHOWN]]
    more = finding.count - len(shown)
    way = {"too_long": "raise data.max_length, or set data.on_too_long=drop, truncate or split"}.get(
        finding.kind, f"mend them, or set data.on_fault.{finding.kind}=drop" + (
            " or report" if KINDS[finding.kind].usable else ""))
    lines = [f"  {finding.kind}, {finding.count:,} {finding.side} row{'s' if finding.count > 1 else ''}"
             f" ({KINDS[finding.kind].meaning})", *shown]
    if more > 0:
        lines.append(f"    and {more:,} more")
    if finding.policy == "error":
        lines.append(f"    way out: {way}")
    return "\n".join(lines)


def dropped(findings: Sequence[Finding]) -> dict[str, int]:
    """Rows left out, by kind."""
    counts: dict[str, int] = {}
    for finding in findings:
        if not KINDS[finding.kind].usable and finding.policy != "error":
            counts[finding.kind] = counts.get(finding.kind, 0) + finding.count
    return counts
