"""What ranks run: the product's own set-up and loop, configuration after configuration."""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from dist.harness import teardown
from shardwise.export.live import gathered_state
from shardwise.train.loop import train
from shardwise.train.parts import Parts
from shardwise.train.setup import build
from shardwise.train.signals import StopRequest


def train_all(args: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Train every run of `args["runs"]` ({name: overrides}); rank 0 returns its metrics and writes its weights."""
    results = {}
    for name, overrides in args["runs"].items():
        with running(args["recipe"], [*overrides, f"run.output_dir={folder / name}"]) as parts:
            began = time.perf_counter()
            train(parts)
            seconds = time.perf_counter() - began
            results[name] = finished(parts, folder / f"{name}.safetensors") | {"seconds": round(seconds, 2)}
    return results


@contextlib.contextmanager
def running(recipe: str, overrides: list[str]):
    """The built parts of a run, and a clean process after it."""
    try:
        parts = build(recipe, overrides, stop=StopRequest(started_at=time.time()))
    except BaseException:
        teardown()
        raise
    try:
        yield parts
    finally:
        teardown(parts.engine.model)


def finished(parts: Parts, path: Path) -> dict[str, Any]:
    """Metrics of a run by column; the whole weights go to `path`. Every rank must call it."""
    state = whole_weights(parts)
    if not parts.ranks.main:
        return {}
    save_file({name: tensor.contiguous().clone() for name, tensor in state.items()}, path)
    lines = [json.loads(line) for line in (parts.folder / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "loss" in line]
    return {"packing": parts.packing, "eval_loss": [line["eval_loss"] for line in lines if "eval_loss" in line],
            **{key: [line[key] for line in steps] for key in (
        "step", "loss", "grad_norm", "lr", "supervised_tokens", "tokens", "examples", "micro_batches")}}


def whole_weights(parts: Parts) -> dict[str, torch.Tensor] | None:
    """The whole state dict on rank 0, whatever the strategy."""
    stage = 0 if parts.resolved.deepspeed is None else parts.resolved.deepspeed["zero_optimization"]["stage"]
    return gathered_state(parts.engine.model if stage else parts.engine, zero_stage=stage)
