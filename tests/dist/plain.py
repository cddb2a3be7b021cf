"""Rank bodies for cases whose rows are given as numbers: (token ids, loss weights) instead of text."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

import dist.toy  # noqa: F401  (registers the model)
from dist.bodies import finished, running
from dist.rows import examples_of
from shardwise.data.store.load import Loaded
from shardwise.model.loss import losses
from shardwise.train import inputs, loop
from shardwise.train.engine import Engine
from shardwise.train.parts import Parts
from shardwise.train.run import summary


class Tokenizer:
    """As much of one as a run needs that reads no text."""

    pad_token_id, eos_token_id, chat_template = 0, 0, None

    def __len__(self) -> int:
        return 1

    def save_pretrained(self, folder: Path) -> None:
        pass


@contextlib.contextmanager
def given(rows: Any) -> Iterator[None]:
    """Within: a run trains on these rows whatever its recipe says."""
    with patch.object(inputs, "load_tokenizer", lambda model: Tokenizer()), \
            patch.object(inputs, "load_data", lambda data, _: Loaded(
                examples_of(rows), examples_of(rows) if data.eval else None, [])):
        yield


def train_rows(args: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Train every run of `args["runs"]` ({name: {rows, overrides}}) and say what really happened on this rank.

    Every rank returns `logged` (each step's result), `lrs` (per step, the rate at each call of torch's optimizer;
    ZeRO calls it once per parameter group), `no_sync` (times DDP was told not to communicate), `hashes` (of the
    weights after each step), `engine_steps`, and the printed plan; rank 0 its metrics besides.
    """
    results = {}
    for name, run in args["runs"].items():
        overrides = [*run["overrides"], f"run.output_dir={folder / name}"]
        with given(run["rows"]), running(args["recipe"], overrides) as parts, observed(parts) as seen:
            loop.train(parts)
            results[name] = finished(parts, folder / f"{name}.safetensors") | seen | {
                "plan": summary(parts), "engine_steps": getattr(parts.engine.model, "global_steps", None)}
    return results


@contextlib.contextmanager
def observed(parts: Parts) -> Iterator[dict[str, Any]]:
    """Within: what the optimizer, DDP and every step do is written down."""
    seen: dict[str, Any] = {"logged": [], "lrs": [], "no_sync": 0, "hashes": []}
    real_step, real_no_sync = loop.optimizer_step, getattr(parts.engine.model, "no_sync", None)

    def step(*args: Any, **more: Any) -> Any:
        seen["lrs"].append([])
        result = real_step(*args, **more)
        seen["logged"].append(dataclasses.asdict(result))
        seen["hashes"].append(weights_hash(parts.engine.module))
        return result

    def no_sync() -> Any:
        seen["no_sync"] += 1
        return real_no_sync()

    if parts.resolved.deepspeed is None and real_no_sync is not None:
        parts.engine.model.no_sync = no_sync
    hook = register_optimizer_step_pre_hook(
        lambda optimizer, *_: seen["lrs"][-1].append(optimizer.param_groups[0]["lr"]))
    try:
        with patch.object(loop, "optimizer_step", step):
            yield seen
    finally:
        hook.remove()


def weights_hash(module: torch.nn.Module) -> str:
    """Of the weights this rank computes with (under zero3: of the part it holds)."""
    digest = hashlib.sha256()
    for parameter in module.parameters():
        digest.update(parameter.detach().float().cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


def master_weights(parts: Parts) -> dict[str, torch.Tensor]:
    """The fp32 weights the optimizer moves, gathered on every rank."""
    if parts.resolved.deepspeed is None:
        return {name: p.detach().clone() for name, p in parts.engine.module.named_parameters()}
    from deepspeed.utils import safe_get_full_fp32_param

    return {name: safe_get_full_fp32_param(p).clone() for name, p in parts.engine.module.named_parameters()}


def push(args: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Drive the engine alone: `steps` times a gradient of one's own choice into the toy model's table.

    A run is {overrides, gradients (one table per rank, or one for each of its micro-batches), steps, lr}. Returns
    {before, after, norms, dtypes} of the fp32 weights, and the plan that is printed.
    """
    results = {}
    for name, run in args["runs"].items():
        overrides = [*run["overrides"], f"run.output_dir={folder / name}"]
        with given([[[0, 0], [0, 1]]]), running(args["recipe"], overrides) as parts:
            own = torch.tensor(run["gradients"][parts.ranks.rank % len(run["gradients"])])
            before = master_weights(parts)["table"]
            norms = [_pushed(parts.engine, own, run["lr"]) for _ in range(run["steps"])]
            weights = master_weights(parts)["table"]
            results[name] = {"before": before.tolist(), "after": weights.tolist(), "norms": norms[-3:],
                             "dtype": str(weights.dtype), "plan": summary(parts)}
    return results


def _pushed(engine: Engine, gradients: torch.Tensor, lr: float) -> float:
    """One step of micro-batches [M, V, V]; the ranks' gradients are averaged."""
    everything = torch.arange(gradients.shape[1])[None]
    for index, gradient in enumerate(gradients):
        engine.micro_step(lambda g=gradient: (engine.model(everything).logits[0].float() * g).sum(),
                          last=index + 1 == len(gradients))
    return engine.apply(lr)


def blow_up(args: dict[str, Any], folder: Path) -> dict[str, Any]:
    """One step of every run with its loss times 1,000; returns the norm of the change of the fp32 weights."""
    results = {}
    for name, run in args["runs"].items():
        overrides = [*run["overrides"], f"run.output_dir={folder / name}"]
        with given(run["rows"]), running(args["recipe"], overrides) as parts:
            before, data = master_weights(parts), parts.step_data(0)
            scale = 1000 * parts.ranks.world_size / data.target_weight
            for index, batch in enumerate(data.batches):
                parts.engine.micro_step(
                    lambda b=batch, by=scale, model=parts.engine.model: losses(model, b, None)[0] * by,
                    last=index + 1 == len(data.batches))
            norm = parts.engine.apply(parts.resolved.config.optim.lr)
            after = master_weights(parts)
            change = torch.cat([(after[key] - before[key]).flatten() for key in before]).norm().item()
            results[name] = {"norm": norm, "change": change}
    return results


def launched_by_accelerate(args: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Train as `accelerate launch` with a DeepSpeed json would start it; returns what DeepSpeed works with."""
    variables = {"ACCELERATE_MIXED_PRECISION": "no", "ACCELERATE_USE_DEEPSPEED": "true",
                 "ACCELERATE_DEEPSPEED_CONFIG_FILE": args["json"]}
    overrides = [*args["overrides"], f"run.output_dir={folder / 'run'}"]
    with patch.dict(os.environ, variables), given(args["rows"]), running(args["recipe"], overrides) as parts:
        engine: Any = parts.engine.model
        data = [parts.step_data(step) for step in range(parts.plan.num_steps)]
        loop.train(parts)
        return {"clipping": engine.gradient_clipping(), "strategy": parts.resolved.strategy,
                "auto_left": '"auto"' in json.dumps(engine.config), "examples": [d.examples for d in data],
                "micro_batches": [len(d.batches) for d in data], "engine_steps": engine.global_steps,
                "rows": [int(batch.segments.max()) + 1 for batch in data[0].batches]}
