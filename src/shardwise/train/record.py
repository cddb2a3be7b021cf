"""What is written down: the lines of metrics.jsonl and the manifest of a run."""

from __future__ import annotations

import platform
import subprocess
import sys
from importlib.metadata import version
from typing import Any

import torch

from shardwise import __version__
from shardwise.config.resolve import Resolved, as_tree
from shardwise.config.shipped import PACKAGE
from shardwise.train.inputs import Inputs
from shardwise.train.parts import Parts, StepData
from shardwise.train.step import StepResult

PACKAGES = ("torch", "accelerate", "deepspeed", "transformers", "datasets", "peft", "wandb")
# What the curve depends on; a checkpoint made with other values does not belong to this run.
NOT_CURVE = ("train", "eval", "packing", "on_fault", "workers")  # of data: the rows' fingerprint covers what matters
CURVE = ("model", "adapter", "data", "optim", "schedule", "precision")


def step_line(parts: Parts, step: int, lr: float, data: StepData, result: StepResult, seconds: float
              ) -> dict[str, Any]:
    """One training line of metrics.jsonl; `tokens_per_second` counts real tokens over all ranks.

    A step that moved no weights has `skipped` and its kind in place of `loss` and `grad_norm`.
    """
    numbers: dict[str, Any] = {"loss": result.loss, "grad_norm": result.grad_norm} if result.refused is None \
        else {"skipped": result.refused.kind}
    line = {"step": step, **numbers, "lr": lr,
            "supervised_tokens": result.supervised_tokens, "tokens": result.tokens,
            "tokens_per_second": round(result.tokens / seconds, 1), "step_seconds": round(seconds, 4),
            "epoch": round(parts.feed.epochs(step), 6), "examples": data.examples,
            "micro_batches": len(data.batches), "padded_tokens": data.padded_tokens,
            "packing_efficiency": round(data.packing_efficiency, 4),
            "memory_gib": round(peak_memory_bytes() / 2**30, 3)}
    if result.loss_scale is not None:
        line["loss_scale"] = result.loss_scale
    if parts.limit.tokens != parts.limit.asked:
        line["max_tokens_per_micro_batch"] = parts.limit.tokens
    if result.router_loss is not None and result.refused is None:
        line["router_loss"] = result.router_loss
    return line


def peak_memory_bytes() -> int:
    """Peak memory of this rank: of the GPU where there is one, else of the process."""
    if torch.cuda.is_available():
        return int(torch.cuda.max_memory_allocated())
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1024 if sys.platform == "linux" else 1)


def manifest(resolved: Resolved, inputs: Inputs) -> dict[str, Any]:
    """What made this run: code, versions, hardware, data, settings, and the identity a resume must share."""
    tree = as_tree(resolved.config)
    identity: dict[str, Any] = {key: tree[key] for key in CURVE}
    # Where and how work is split may differ between sessions of one run; what is computed may not.
    identity["model"] = {k: v for k, v in tree["model"].items() if k not in ("attention", "gradient_checkpointing")}
    identity["data"] = {k: v for k, v in tree["data"].items() if k not in NOT_CURVE}
    identity |= {"seed": resolved.config.run.seed, **inputs.identity,
                 "examples_per_step": resolved.config.batch.examples_per_step}
    held_out = inputs.held_out
    return {
        "identity": {"curve": identity, "strategy": resolved.strategy, "offload": resolved.offload,
                     "world_size": resolved.world_size},
        "git": git_state(), "command": sys.argv[1:], "python": platform.python_version(),
        "packages": {"shardwise": __version__, **{name: version(name) for name in PACKAGES}},
        "hardware": {"machine": platform.machine(), "system": platform.system(),
                     "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]},
        "data": {"train": inputs.counts, "eval": None if held_out is None else held_out.counts,
                 "eval_fingerprint": None if held_out is None else held_out.fingerprint},
        "config": tree, "deepspeed": resolved.deepspeed,
    }


def git_state() -> dict[str, Any] | None:
    """Commit and dirtiness of the checkout shardwise runs from; None outside one."""
    try:
        sha, changes = (subprocess.run(["git", "-C", str(PACKAGE), *words], capture_output=True, text=True,
                                       check=True, timeout=10).stdout.strip()
                        for words in (["rev-parse", "HEAD"], ["status", "--porcelain"]))
    except (OSError, subprocess.SubprocessError):
        return None
    return {"sha": sha, "dirty": bool(changes)}
