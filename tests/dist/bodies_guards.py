"""What ranks run for the tests of guards: steps that must not move the weights. The faults come from here alone."""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from dist.bodies import running
from dist.plain import given
from shardwise.errors import Stopped, TrainingError
from shardwise.train import loop, loss_scale
from shardwise.train import step as step_module
from shardwise.train.guard import Refusal
from shardwise.train.metrics import read_metrics
from shardwise.train.parts import Parts
from shardwise.train.step import StepResult

SCALE = 2.0 ** 10
"""fp16's first factor: from the product's the gradients of so small a model overflow by themselves."""


def train_struck(args: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Train every run of `args["runs"]` ({name: {rows, overrides, strikes, omit}}) and say what each rank saw.

    `strikes` {step from 1: strike} hits the last rank: "nan" and "inf" are put into one gradient element ("once inf"
    at the first try only), a number multiplies the gradient, "loss nan" spoils the loss. Steps in `omit` are not
    carried out at all. Returns per run `ended`, `start` and `hashes` (of all this rank holds, before the first and
    after each step), `norms`, `again`, and on rank 0 `metrics` and `guard` (the lines of the two files).
    """
    results = {}
    for name, run in args["runs"].items():
        overrides = [*run["overrides"], f"run.output_dir={folder / run.get('folder', name)}"]
        with fp16_allowed(), patch.object(loss_scale, "FIRST", SCALE), given(run["rows"]), \
                running(args["recipe"], overrides) as parts, \
                struck(parts, run.get("strikes", {}), run.get("omit", [])) as seen:
            ended = "done"
            try:
                loop.train(parts)
            except (Stopped, TrainingError) as error:
                ended = f"{type(error).__name__}: {error}"
            results[name] = seen | {"ended": ended, "checkpoints": checkpoints(parts)}
            if parts.ranks.main:
                results[name] |= {"metrics": read_metrics(parts.folder / "metrics.jsonl"),
                                  "guard": read_metrics(parts.folder / "guard.jsonl")}
    return results


def fp16_allowed() -> Any:
    """Within: DeepSpeed computes in fp16 on a CPU without kernels for it, slowly, which is enough for a test."""
    from deepspeed.accelerator import get_accelerator

    return patch.object(type(get_accelerator()), "is_fp16_supported", lambda self: True)


def checkpoints(parts: Parts) -> list[str]:
    return sorted(path.name for path in (parts.folder / "checkpoints").glob("*"))


@contextlib.contextmanager
def struck(parts: Parts, strikes: dict[str, Any], omit: list[int]) -> Iterator[dict[str, Any]]:
    """Within: the strikes happen, and what every step leaves behind is written down."""
    seen: dict[str, Any] = {"start": everything(parts), "hashes": [], "norms": [], "again": []}
    real, real_losses = loop.optimizer_step, step_module.losses
    blow: Any = None
    target = next(p for p in parts.engine.module.parameters() if p.requires_grad)

    def spoil(gradient: torch.Tensor) -> torch.Tensor:
        if blow is None or blow == "loss nan":
            return gradient
        spoilt = gradient.clone()
        if isinstance(blow, str):
            spoilt.view(-1)[0] = float(blow.removeprefix("once "))
        else:
            spoilt *= blow
        return spoilt

    def losses(*args: Any) -> Any:
        cross_entropy, router_loss = real_losses(*args)
        return cross_entropy * (math.nan if blow == "loss nan" else 1.0), router_loss

    def step(engine: Any, batches: Any, **numbers: Any) -> StepResult:
        nonlocal blow
        now = parts.start_step + len(seen["hashes"]) + 1
        blow = strikes.get(str(now)) if parts.ranks.rank == parts.ranks.world_size - 1 else None
        if str(blow).startswith("once") and now in [at for at, _ in seen["again"]]:
            blow = None
        if now in omit:
            result = StepResult(loss=math.nan, router_loss=None, grad_norm=math.nan, supervised_tokens=0, tokens=1,
                                stop=False, save=False, loss_scale=None, refused=Refusal("non_finite", "skip"))
        else:
            result = real(engine, batches, **numbers)
        if result.again is not None:
            seen["again"].append([now, result.again])
            return result
        seen["hashes"].append(everything(parts))
        seen["norms"].append(result.grad_norm if math.isfinite(result.grad_norm) else None)
        return result

    hook = target.register_hook(spoil)
    try:
        with patch.object(loop, "optimizer_step", step), patch.object(step_module, "losses", losses):
            yield seen
    finally:
        hook.remove()


def everything(parts: Parts) -> str:
    """A hash of the weights this rank computes with, the fp32 ones its optimizer moves, and the optimizer's state."""
    digest = hashlib.sha256()
    for parameter in parts.engine.module.parameters():
        _add(digest, getattr(parameter, "ds_tensor", parameter))
    held: Any = getattr(parts.engine.model, "optimizer", None) or parts.engine.optimizer
    for name in ("single_partition_of_fp32_groups", "fp32_partitioned_groups_flat", "fp32_groups_flat_partition"):
        for master in getattr(held, name, None) or []:
            _add(digest, master)
    digests = []
    for states in getattr(held, "optimizer", held).state.values():
        own = hashlib.sha256()
        for key in sorted(states):
            own.update(key.encode())
            _add(own, torch.as_tensor(states[key]))
        digests.append(own.digest())
    digest.update(b"".join(sorted(digests)))  # which parameter comes first means nothing
    return digest.hexdigest()[:16]


def _add(digest: Any, tensor: torch.Tensor) -> None:
    digest.update(tensor.detach().float().cpu().contiguous().numpy().tobytes())
