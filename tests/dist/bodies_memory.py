"""What ranks run for the tests of running out of memory. The last rank is given a memory of so many tokens."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from dist.bodies import finished, running
from dist.plain import given
from shardwise.errors import OutOfMemory, TrainingError
from shardwise.train import loop
from shardwise.train import step as step_module
from shardwise.train.metrics import read_metrics


def train_short(args: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Train every run of `args["runs"]` ({name: {rows, overrides, capacity, where, from_micro_step}}).

    From that micro-step on, the last rank runs out of memory in a micro-batch of more than `capacity` tokens, `where`
    is before the forward pass, after it, or in the backward pass. Returns per run `ended` and `limit`, and on rank 0
    the columns of its metrics, `lines` (all of them) and `file` (of the limit).
    """
    results = {}
    for name, run in args["runs"].items():
        overrides = [*run["overrides"], f"run.output_dir={folder / run.get('folder', name)}"]
        with given(run["rows"]), running(args["recipe"], overrides) as parts, short(run):
            result: dict[str, Any] = {"ended": "done"}
            try:
                loop.train(parts)
                result |= finished(parts, folder / f"{name}.safetensors")
            except (TrainingError, OutOfMemory) as error:
                result["ended"] = f"{type(error).__name__}: {error}"
            result["limit"] = parts.limit.tokens
            if parts.ranks.main:
                result["lines"] = read_metrics(parts.folder / "metrics.jsonl")
                result["file"] = parts.limit.path.read_text() if parts.limit.path.exists() else None
            results[name] = result
    return results


@contextlib.contextmanager
def short(run: dict[str, Any]) -> Iterator[None]:
    """Within: this rank, if it is the last, has only so much memory."""
    real, micro_step = step_module.losses, 0
    last = int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1

    def fail(*_: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. (said by the test)")

    def losses(model: Any, batch: Any, router: Any) -> Any:
        nonlocal micro_step
        micro_step += 1
        fits = batch.input_ids.numel() <= run["capacity"] or micro_step <= run.get("from_micro_step", 0)
        if last and not fits and run["where"] == "before":
            fail()
        cross_entropy, router_loss = real(model, batch, router)
        if last and not fits and run["where"] == "after":
            fail()
        if last and not fits and run["where"] == "backward":
            cross_entropy.register_hook(fail)
        return cross_entropy, router_loss

    with patch.object(step_module, "losses", losses):
        yield
