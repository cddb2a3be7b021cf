"""The one DeepSpeed dict: ZeRO knobs from a json file, everything else from the recipe.

Keys: https://www.deepspeed.ai/docs/config-json/
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from shardwise.config.shipped import shipped
from shardwise.errors import ConfigError

STAGES = {"zero1": 1, "zero2": 2, "zero3": 3}

# Numbers the recipe owns; a json may leave them out, say "auto", or agree.
OWNED_BY = {
    "train_batch_size": "batch.examples_per_step",
    "train_micro_batch_size_per_gpu": "batch.max_tokens_per_micro_batch",
    "gradient_accumulation_steps": "batch.examples_per_step",
    "gradient_clipping": "optim.max_grad_norm",
    "bf16": "precision", "fp16": "precision", "torch_autocast": "precision", "amp": "precision",
    "data_types": "precision", "communication_data_type": "precision",
    "optimizer": "optim", "scheduler": "schedule", "zero_force_ds_cpu_optimizer": "offload",
    "zero_allow_untested_optimizer": "optim", "activation_checkpointing": "model.gradient_checkpointing",
    "steps_per_print": "metrics.jsonl", "wall_clock_breakdown": "metrics.jsonl",
}
# What DeepSpeed itself uses when these are left out; "auto" means the same here.
AUTO = {"reduce_bucket_size": 500_000_000, "allgather_bucket_size": 500_000_000,
        "stage3_prefetch_bucket_size": 50_000_000, "stage3_param_persistence_threshold": 100_000,
        "stage3_max_live_parameters": 1_000_000_000, "stage3_max_reuse_distance": 1_000_000_000}
TRUTHS = ("overlap_comm", "contiguous_gradients", "reduce_scatter", "round_robin_gradients", "pin_memory",
          "stage3_gather_16bit_weights_on_model_save")


def zero_file(strategy: str, offload: str) -> Path:
    """The shipped json for a strategy and offload."""
    name = "zero3_offload" if strategy == "zero3" and offload == "params" else strategy
    return shipped("ds_configs", f"{name}.json")


def deepspeed_dict(path: Path, *, strategy: str, offload: str, precision: str, optimizer: str,
                   max_grad_norm: float | None, world_size: int) -> dict[str, Any]:
    """The complete DeepSpeed configuration, with no "auto" left in it.

    Accumulation is 1 because windows of any length are driven step by step (train/engine.py), and the micro
    batch is 1 because DeepSpeed only multiplies it with the world size. Raises ConfigError for a json that
    contradicts the recipe, naming the key, the value and the owner.
    """
    given = _read(path)
    faults = _ownership(given, path, max_grad_norm)
    zero = dict(given.get("zero_optimization", {}))
    faults += _numbers(zero, path)
    stage = zero.setdefault("stage", STAGES[strategy])
    if stage != STAGES[strategy]:
        faults.append(f"{path}: zero_optimization.stage={stage!r} contradicts strategy={strategy}")
    faults += _offload(zero, path, offload)
    if faults:
        raise ConfigError(faults)
    resolved = {key: value for key, value in given.items() if key not in OWNED_BY}
    resolved.update(
        zero_optimization=zero,
        train_micro_batch_size_per_gpu=1, gradient_accumulation_steps=1, train_batch_size=world_size,
        gradient_clipping=max_grad_norm or 0.0,
        # Off for bf16 it would take a step whose norm is not finite (train/engine.py relies on that being refused).
        bf16={"enabled": precision == "bf16", "check_grad_overflow": True},
        # A fixed scale, because ours is put in its place: it must mean the same under every strategy.
        fp16={"enabled": precision == "fp16", "loss_scale": 1.0},
        data_types={"grad_accum_dtype": "fp32"},
        communication_data_type="fp32",
        zero_allow_untested_optimizer=True,
        # DeepSpeed's own CPU Adam does the step where the state is in host memory; SGD has no such kernel.
        zero_force_ds_cpu_optimizer=offload != "none" and optimizer == "adamw",
        steps_per_print=1_000_000_000,
    )
    return resolved


def _read(path: Path) -> dict[str, Any]:
    try:
        given = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such DeepSpeed configuration") from None
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path}:{error.lineno}: not valid JSON: {error.msg}") from None
    if not isinstance(given, dict) or not isinstance(given.get("zero_optimization", {}), dict):
        raise ConfigError(f"{path}:1: a DeepSpeed configuration is a JSON object")
    return given


def _ownership(given: dict[str, Any], path: Path, max_grad_norm: float | None) -> list[str]:
    agrees = {"gradient_clipping": max_grad_norm or 0.0}
    return [f"{path}: {key}={json.dumps(value)} is decided by the recipe ({OWNED_BY[key]}); "
            f'remove it or write "auto"'
            for key, value in given.items()
            if key in OWNED_BY and not _all_auto(value) and value != agrees.get(key)]


def _all_auto(value: Any) -> bool:
    if isinstance(value, dict):
        return all(_all_auto(inner) for inner in value.values())
    return bool(value == "auto")


def _numbers(zero: dict[str, Any], path: Path) -> list[str]:
    faults = []
    for key, value in list(zero.items()):
        if value == "auto":
            if key not in AUTO:
                faults.append(f'{path}: zero_optimization.{key}="auto" has no meaning; give a value')
            zero[key] = AUTO.get(key)
        elif key in TRUTHS and not isinstance(value, bool):
            faults.append(f"{path}: zero_optimization.{key}={json.dumps(value)} must be true or false")
        elif isinstance(value, str):
            faults.append(f"{path}: zero_optimization.{key}={json.dumps(value)} is text; "
                          "a number is wanted, without quotation marks")
        elif key in AUTO and isinstance(value, float):
            zero[key] = int(value)
    return faults


def _offload(zero: dict[str, Any], path: Path, offload: str) -> list[str]:
    wanted = {"offload_optimizer": offload != "none", "offload_param": offload == "params"}
    faults = []
    for key, on in wanted.items():
        device = zero.get(key, {}).get("device", "none")
        if device not in ("none", "cpu"):
            faults.append(f"{path}: zero_optimization.{key}.device={device!r}; only cpu is supported")
        elif device == "cpu" and not on:
            faults.append(f"{path}: zero_optimization.{key} contradicts offload={offload}")
        elif on:
            zero[key] = {"pin_memory": True, **zero.get(key, {}), "device": "cpu"}
        else:
            zero.pop(key, None)
    return faults
