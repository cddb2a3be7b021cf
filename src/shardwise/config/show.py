"""The resolved config as a person reads it: values with origins, derived numbers, the arithmetic line."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shardwise.config.resolve import Resolved, as_tree
from shardwise.config.schema import Config

# Rough bytes per token of English text in common vocabularies; only for the "~" of the arithmetic line.
BYTES_PER_TOKEN = 4
SAMPLE_BYTES = 1 << 20


def text(resolved: Resolved) -> str:
    """Everything `shardwise config` prints."""
    lines = [f"{line:<58} # {origin}" for line, origin in _lines(resolved)]
    lines += ["", "derived", *(f"  {key}: {value}" for key, value in derived(resolved).items()),
              "", arithmetic(resolved)]
    if resolved.deepspeed is not None:
        lines += ["", "deepspeed", json.dumps(resolved.deepspeed, indent=2)]
    return "\n".join(lines)


def as_json(resolved: Resolved) -> str:
    """The same for programs: config, origins, derived, arithmetic, deepspeed."""
    return json.dumps({"config": as_tree(resolved.config), "origins": resolved.origins,
                       "derived": derived(resolved), "arithmetic": arithmetic(resolved),
                       "deepspeed": resolved.deepspeed}, indent=2)


def derived(resolved: Resolved) -> dict[str, Any]:
    """The numbers that follow from the settings."""
    return {"strategy": resolved.strategy, "offload": resolved.offload, "world_size": resolved.world_size,
            "examples_per_step": resolved.config.batch.examples_per_step,
            "max_tokens_per_micro_batch": resolved.max_tokens_per_micro_batch,
            "gradient_checkpointing": resolved.gradient_checkpointing, "attention": resolved.attention,
            "time_limit_seconds": resolved.time_limit_seconds}


def arithmetic(resolved: Resolved, mean_tokens: float | None = None) -> str:
    """`64 examples/step = 2 ranks x ~4 micro-batches x <= 8,192 tokens`.

    `mean_tokens` is an example's length where it is known; else it is estimated from the training file.
    """
    limit, ranks = resolved.max_tokens_per_micro_batch, resolved.world_size
    examples = resolved.config.batch.examples_per_step
    mean = _mean_tokens(resolved.config) if mean_tokens is None else mean_tokens
    count = "?" if mean is None else f"~{max(1, math.ceil(examples * min(mean, limit) / (ranks * limit)))}"
    return (f"{examples:,} examples/step = {ranks} rank{'s' * (ranks > 1)} x {count} micro-batches "
            f"x <= {limit:,} tokens")


def _mean_tokens(config: Config) -> float | None:
    """Estimated tokens per example from the first megabyte of the first training file; None if unreadable."""
    if config.data.task == "pretrain":
        return config.data.max_length
    path = config.data.train[0].path
    if path is None or not Path(path).is_file():
        return None
    with open(path, "rb") as file:
        rows = file.read(SAMPLE_BYTES).splitlines()
    return min(sum(map(len, rows)) / BYTES_PER_TOKEN / len(rows), config.data.max_length) if rows else None


def _lines(resolved: Resolved) -> Iterator[tuple[str, str]]:
    config = resolved.config
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if not dataclasses.is_dataclass(value):
            yield f"{field.name}: {flow(value)}", resolved.origins[field.name]
            continue
        yield from _section(field.name, value, resolved.origins, "")


def _section(key: str, section: Any, origins: dict[str, str], indent: str) -> Iterator[tuple[str, str]]:
    yield f"{indent}{key.rsplit('.', 1)[-1]}:", ""
    for field in dataclasses.fields(section):
        inner, value = f"{key}.{field.name}", getattr(section, field.name)
        if inner in origins:
            yield f"{indent}  {field.name}: {flow(value)}", origins[inner]
        else:
            yield from _section(inner, value, origins, indent + "  ")


def flow(value: Any) -> str:
    """A value as one line of YAML."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        kept = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return "{" + ", ".join(f"{k}: {flow(v)}" for k, v in kept.items() if v is not None) + "}"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k}: {flow(v)}" for k, v in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(flow, value)) + "]"
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    return f"{value:g}" if isinstance(value, float) else str(value)
