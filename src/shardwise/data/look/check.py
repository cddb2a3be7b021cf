"""`shardwise data check`: what the data comes to, and everything that is wrong with it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from shardwise.config.schema import DataConfig
from shardwise.data.faults import KINDS
from shardwise.data.store import findings
from shardwise.data.store.examples import Examples
from shardwise.data.store.findings import Finding
from shardwise.data.store.load import inspect, refused_as_a_whole

BAR = 40
"""Characters of the longest bar of a histogram."""


def check(data: DataConfig, tokenizer: Any) -> tuple[dict[str, Any], list[Finding]]:
    """Everything about the data as one JSON object, and the findings; `ok` says whether training would go ahead.

    Raises DataError only for what leaves nothing to report on (a missing file, an empty source).
    """
    loaded = inspect(data, tokenizer)
    refused = refused_as_a_whole(loaded, data)
    bad = any(finding.policy == "error" for finding in loaded.findings)
    return {"ok": not bad and refused is None, "refused": refused, "train": side(loaded.train),
            "eval": None if loaded.held_out is None else side(loaded.held_out),
            "findings": [as_object(finding) for finding in loaded.findings]}, loaded.findings


def side(examples: Examples) -> dict[str, Any]:
    """Counts and histograms of the training or the held-out data."""
    share = examples.supervised / np.maximum(examples.lengths, 1)
    return {**examples.counts,
            "sources": [{"files": s.facts["files"], "rows": s.facts["rows"], "examples": size, "weight": weight}
                        for s, (size, weight) in zip(examples.sources, examples.parts, strict=True)],
            "supervised_share": round(float(examples.supervised.sum()) / max(1, int(examples.lengths.sum())), 6),
            "length": {**_quantiles(examples.lengths), "histogram": _lengths(examples.lengths)},
            "share": {**_quantiles(share), "histogram": _shares(share)}}


def as_object(finding: Finding) -> dict[str, Any]:
    """A finding for --json: all addresses that were kept."""
    return {"side": finding.side, "kind": finding.kind, "count": finding.count, "policy": finding.policy,
            "meaning": KINDS[finding.kind].meaning,
            "rows": [{"row": place, "what": text} for place, text in finding.rows]}


def _quantiles(values: np.ndarray) -> dict[str, float]:
    if not len(values):
        return {}
    names = {"min": 0, "median": 0.5, "p90": 0.9, "p99": 0.99, "max": 1}
    return {name: round(float(np.quantile(values, q)), 4) for name, q in names.items()}


def _lengths(lengths: np.ndarray) -> list[list[Any]]:
    """Examples per doubling of the length."""
    edges = [0, *(1 << k for k in range(4, int(lengths.max()).bit_length() + 1))] if len(lengths) else []
    return [[f"{low + 1:,}-{high:,}", count]
            for low, high, count in zip(edges, edges[1:], _upper_closed(lengths, edges), strict=False)]


def _upper_closed(values: np.ndarray, edges: Sequence[float]) -> list[int]:
    """How many lie in (low, high] for each pair of neighbours."""
    below = np.searchsorted(np.sort(values), edges, side="right")
    return [int(n) for n in np.diff(below)]


def _shares(share: np.ndarray) -> list[list[Any]]:
    edges = [k / 10 for k in range(11)]
    counts, _ = np.histogram(share, edges)
    return [[f"{low:.0%}-{high:.0%}", int(count)] for low, high, count in zip(edges, edges[1:], counts, strict=False)]


def text(report: dict[str, Any], found: Sequence[Finding]) -> str:
    """The same for people."""
    lines: list[str] = []
    for name in ("train", "eval"):
        if report[name] is not None:
            lines += [*_side_lines(name, report[name]), ""]
    kinds = [findings.described(finding) for finding in found]
    fates = {"error": "wrong, so training would not start:", "drop": "left out:", "report": "kept, worth knowing:"}
    for policy, head in fates.items():
        chosen = [words for finding, words in zip(found, kinds, strict=True) if finding.policy == policy]
        lines += [head, *chosen, ""] if chosen else []
    if report["refused"]:
        lines += [report["refused"], ""]
    lines.append("nothing is wrong: training would start" if report["ok"] else "not fit for training as it is")
    return "\n".join(lines)


def _side_lines(name: str, side: dict[str, Any]) -> Iterator[str]:
    yield (f"{name}: {side['examples']:,} examples of {side['rows']:,} rows, {side['tokens']:,} tokens, "
           f"{side['supervised_tokens']:,} of them supervised ({side['supervised_share']:.1%})")
    if len(side["sources"]) > 1:
        for source in side["sources"]:
            files = source["files"]
            more = f" and {len(files) - 1:,} more files" if len(files) > 1 else ""
            yield (f"  {files[0] if files else '-'}{more}: {source['examples']:,} examples of {source['rows']:,} rows"
                   + (f", weight {source['weight']:g}" if source["weight"] != 1 else ""))
    for key, words in (("truncated", "cut at data.max_length"), ("split", "parts of split conversations"),
                       ("split_lost", "of them beside a part that was too long even alone and is left out"),
                       ("tokens_lost", "tokens left over in a last block of one, which nothing precedes")):
        if side[key]:
            yield f"  {side[key]:,} {words}"
    for key, title in (("length", "tokens per example"), ("share", "supervised share per example")):
        if side["examples"]:
            facts = side[key]
            shown = ", ".join(f"{n} {facts[n]:,.0f}" if key == "length" else f"{n} {facts[n]:.0%}"
                              for n in ("min", "median", "p90", "p99", "max"))
            yield f"  {title} ({shown})"
            yield from _bars(facts["histogram"])


def _bars(histogram: Sequence[list[Any]]) -> Iterator[str]:
    most = max((count for _, count in histogram), default=0) or 1
    filled = [number for number, (_, count) in enumerate(histogram) if count]
    for label, count in histogram[filled[0]:filled[-1] + 1] if filled else []:
        bar = "█" * (round(BAR * count / most) or (1 if count else 0))
        yield f"    {label:>15} {count:>9,} {bar}".rstrip()
