"""What a run trains and evaluates on: opened, checked, planned, before any model is loaded."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from shardwise.config.resolve import Resolved, StepPlan, plan_steps
from shardwise.config.schema import SourceConfig
from shardwise.data.steps.feed import Feed, StoredFeed, StreamFeed
from shardwise.data.steps.stream import Cursor, Stream
from shardwise.data.steps.windows import epoch_examples
from shardwise.data.store.examples import Examples
from shardwise.data.store.load import load_data, load_held_out
from shardwise.data.tokenizer import load_tokenizer
from shardwise.errors import DataError


@dataclass(frozen=True)
class Inputs:
    """The data of a run and the steps it comes to."""

    tokenizer: Any
    held_out: Examples | None
    counts: dict[str, Any] | None
    """Of the training data (see Examples.counts); None for a stream, which nobody has counted."""
    identity: dict[str, Any]
    """What a resumed run must have in common."""
    sample: list[int]
    """Token ids of one training example."""
    plan: StepPlan
    sources: list[dict[str, Any]]
    """Of the training data: name, rows and fingerprint of each source; rows None where nobody counted them."""
    held_out_sources: list[dict[str, Any]]
    """The same of what is evaluated on."""
    feed: Callable[[dict[str, Any]], Feed]
    """The feed from a checkpoint's state on; `{}` is the start."""


def load_inputs(resolved: Resolved) -> Inputs:
    """Open the data of a recipe. Raises UserError naming rows and settings."""
    tokenizer = load_tokenizer(resolved.config.model)
    return (_streamed if resolved.config.data.streaming else _stored)(resolved, tokenizer)


def _stored(resolved: Resolved, tokenizer: Any) -> Inputs:
    config = resolved.config
    data = load_data(config.data, tokenizer)
    train, held_out = data.train, data.held_out
    for examples in filter(None, (train, held_out)):
        _fits(examples, resolved)
    step = {"seed": config.run.seed, "examples_per_step": config.batch.examples_per_step}
    return Inputs(
        tokenizer=tokenizer, held_out=held_out, counts=train.counts, sample=train.get([0])[0][0].tolist(),
        identity={"data_fingerprint": train.fingerprint, "data_parts": train.parts},  # examples, weight of each source
        plan=plan_steps(config, functools.partial(epoch_examples, train.parts)),
        sources=_described(config.data.train, train), held_out_sources=_described(config.data.eval, held_out),
        feed=lambda state: StoredFeed(train, **step))


def _streamed(resolved: Resolved, tokenizer: Any) -> Inputs:
    config = resolved.config
    held_out = load_held_out(config.data, tokenizer)
    if held_out is not None:
        _fits(held_out, resolved)
    stream = Stream(config.data, tokenizer, seed=config.run.seed, held_out=_marks(held_out, config.data.task))
    first = next(stream.examples(Cursor()))  # a source at fault is named before a model is loaded
    assert first is not None, "an epoch without an example raises"
    mark = hashlib.sha256(json.dumps(stream.content, sort_keys=True).encode()).hexdigest()[:32]
    return Inputs(
        tokenizer=tokenizer, held_out=held_out, counts=None, sample=first.encoded.ids.tolist(),
        identity={"data_fingerprint": mark}, plan=plan_steps(config, None),
        sources=_described(config.data.train, None), held_out_sources=_described(config.data.eval, held_out),
        feed=lambda state: StreamFeed(stream, examples_per_step=config.batch.examples_per_step, state=state))


def _described(sources: Sequence[SourceConfig], examples: Examples | None) -> list[dict[str, Any]]:
    opened = [None] * len(sources) if examples is None else examples.sources
    return [{"name": source.path or source.hub, "rows": None if cached is None else cached.facts["rows"],
             "fingerprint": None if cached is None else cached.content}
            for source, cached in zip(sources, opened, strict=True)]


def _marks(held_out: Examples | None, task: str) -> frozenset[int]:
    """Of the held-out chats, or of all documents: blocks name only those that they begin in."""
    if held_out is None:
        return frozenset()
    columns = [held_out.column("hash")] if task == "sft" else [source.index["hash"] for source in held_out.sources]
    return frozenset(mark for column in columns for mark in column.tolist())


def _fits(examples: Examples, resolved: Resolved) -> None:
    longest = int(examples.lengths.argmax())
    if examples.lengths[longest] > resolved.max_tokens_per_micro_batch:
        raise DataError(f"{examples.place(longest)}: {examples.lengths[longest]:,} tokens, more than "
                        f"batch.max_tokens_per_micro_batch={resolved.max_tokens_per_micro_batch:,}; raise that, "
                        "or lower data.max_length")
