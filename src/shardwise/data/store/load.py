"""From the settings to the examples of a run: open every source, look for faults, apply the policy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from shardwise.config.schema import DataConfig, SourceConfig
from shardwise.data.rows import FLAGS
from shardwise.data.store import findings
from shardwise.data.store.cached import open_source
from shardwise.data.store.examples import Examples, blocks, chats
from shardwise.data.store.findings import Finding
from shardwise.errors import DataError


@dataclass(frozen=True)
class Loaded:
    """Both sides of the data, faulty rows left out, and all that was found."""

    train: Examples
    held_out: Examples | None
    findings: list[Finding]


def load_data(data: DataConfig, tokenizer: Any) -> Loaded:
    """The examples to train and to evaluate on. Raises DataError for rows whose policy is `error`."""
    loaded = inspect(data, tokenizer)
    findings.refuse(loaded.findings)
    senseless = refused_as_a_whole(loaded, data)
    if senseless is not None:
        raise DataError(senseless)
    return loaded


def inspect(data: DataConfig, tokenizer: Any) -> Loaded:
    """The same without a refusal: everything that was found is in `findings`.

    Of data that is to be streamed nothing but counts is kept. Raises DataError for a hub data set of that kind,
    which cannot be read through without being fetched.
    """
    if data.streaming and any(source.hub is not None for source in data.train):
        raise DataError("a hub data set that is streamed cannot be checked without fetching it all; check it with "
                        "data.streaming=false, or a part of it with a limit")
    train = _side("train", data.train, data, tokenizer, keep_tokens=not data.streaming)
    if not data.eval:
        return Loaded(train.examples, None, train.findings)
    held_out = _side("eval", data.eval, data, tokenizer)
    shared = list(findings.overlaps(train.rows, held_out.rows, data))
    examples = held_out.examples
    if shared and shared[0].policy == "drop":
        examples = examples.without(findings.overlap(train.rows, examples), "eval_overlap")
    return Loaded(train.examples, examples, [*train.findings, *held_out.findings, *shared])


def load_held_out(data: DataConfig, tokenizer: Any) -> Examples | None:
    """The held-out examples alone. Raises DataError for rows whose policy is `error`."""
    if not data.eval:
        return None
    held_out = _side("eval", data.eval, data, tokenizer)
    findings.refuse(held_out.findings)
    senseless = _senseless("eval", held_out.examples, data)
    if senseless is not None:
        raise DataError(senseless)
    return held_out.examples


class Side(NamedTuple):
    """Training or evaluation."""

    examples: Examples
    rows: Examples
    """One for each usable row: the examples themselves, or the documents that pretraining blocks are cut from."""
    findings: list[Finding]


def _side(side: str, sources: Sequence[SourceConfig], data: DataConfig, tokenizer: Any,
          keep_tokens: bool = True) -> Side:
    opened = [open_source(source, data, tokenizer, keep_tokens=keep_tokens) for source in sources]
    weights = [source.weight for source in sources]
    rows = chats(opened, weights)
    found = list(findings.row_findings(side, rows, data))
    if side == "train":
        found += findings.duplicates(side, rows, data)
    if data.task == "pretrain":
        return Side(_counted(blocks(opened, weights, data.max_length), found), rows, found)
    examples = _counted(rows, found)
    for finding in found:
        if finding.policy != "drop":
            continue
        if finding.kind == "duplicate":
            examples = examples.without(findings.repeated(examples), "duplicate")
        elif finding.kind in FLAGS:
            examples = examples.without(examples.column("flags") >> FLAGS.index(finding.kind) & 1 == 1, finding.kind)
    return Side(examples, examples, found)


def _counted(examples: Examples, found: Sequence[Finding]) -> Examples:
    flags = examples.column("flags") if len(examples) else np.zeros(0, np.int64)
    extra = {name: int((flags >> FLAGS.index(name) & 1 == 1).sum()) for name in ("truncated", "split", "split_lost")}
    return replace(examples, counts={**examples.counts, **extra, "dropped": findings.dropped(found)})


def refused_as_a_whole(loaded: Loaded, data: DataConfig) -> str | None:
    """What is wrong with a side of the data as a whole; None when nothing is."""
    wrong = (_senseless(name, examples, data) for name, examples in (("train", loaded.train), ("eval", loaded.held_out))
             if examples is not None)
    return next(filter(None, wrong), None)


def _senseless(name: str, examples: Examples, data: DataConfig) -> str | None:
    counts = examples.counts
    if len(examples) == 0:
        why = ", ".join(f"{kind}: {count:,}" for kind, count in counts["dropped"].items()) or "see above"
        return f"data.{name}: no usable example is left of {counts['rows']:,} rows (left out: {why})"
    if data.task == "sft" and counts["supervised_tokens"] >= counts["tokens"] - len(examples):
        return (f"data.{name}: every token is supervised, which response-only training never means; "
                "check the chat template")
    return None
