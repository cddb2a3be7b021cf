"""What the launcher that started this process has already decided, read from its environment variables."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from shardwise.errors import ConfigError

# Set by our own launcher: the decision is the recipe's, so there is nothing to contradict.
OURS = "SHARDWISE_LAUNCHED"


@dataclass(frozen=True, kw_only=True, slots=True)
class Launcher:
    """A launcher's choices; None where it made none (torchrun, or a plain `python -m`)."""

    strategy: str | None = None
    offload: str | None = None
    deepspeed_file: Path | None = None


def from_environment(env: Mapping[str, str]) -> Launcher:
    """Read the choices `accelerate launch` hands down. Raises ConfigError for one we cannot follow."""
    if env.get(OURS) or "ACCELERATE_MIXED_PRECISION" not in env:
        return Launcher()
    if env.get("ACCELERATE_USE_FSDP") == "true" or env.get("ACCELERATE_USE_MEGATRON_LM") == "true":
        raise ConfigError("accelerate launch: FSDP and Megatron are not offered; start with one of "
                          "accelerate_configs/{ddp,zero1,zero2,zero3,zero3_offload}.yaml")
    accumulation = env.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "auto")
    if accumulation not in ("auto", "1"):
        raise ConfigError(f"accelerate launch: gradient_accumulation_steps={accumulation} is decided by the "
                          "recipe (batch.examples_per_step); remove it from the accelerate configuration")
    if env.get("ACCELERATE_USE_DEEPSPEED") != "true":
        return Launcher(strategy="ddp", offload="none")
    named = env.get("ACCELERATE_DEEPSPEED_CONFIG_FILE")
    return _from_file(Path(named)) if named else _from_fields(env)


def _from_file(path: Path) -> Launcher:
    try:
        zero = json.loads(path.read_text(encoding="utf-8")).get("zero_optimization", {})
    except FileNotFoundError:
        raise ConfigError(f"accelerate launch: deepspeed_config_file {path} does not exist "
                          f"(seen from {Path.cwd()})") from None
    except (json.JSONDecodeError, AttributeError) as error:
        raise ConfigError(f"{path}: not a DeepSpeed configuration: {error}") from None
    params = zero.get("offload_param", {}).get("device", "none")
    optimizer = zero.get("offload_optimizer", {}).get("device", "none")
    return Launcher(strategy=_strategy(zero.get("stage", "missing"), str(path)), deepspeed_file=path,
                    offload=_offload(params, optimizer))


def _from_fields(env: Mapping[str, str]) -> Launcher:
    stage = env.get("ACCELERATE_DEEPSPEED_ZERO_STAGE", "2")
    return Launcher(strategy=_strategy(stage, "accelerate launch"),
                    offload=_offload(env.get("ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE", "none"),
                                     env.get("ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE", "none")))


def _strategy(stage: object, place: str) -> str:
    if str(stage) not in ("1", "2", "3"):
        raise ConfigError(f"{place}: ZeRO stage {stage} is not offered; use 1, 2 or 3, or ddp without DeepSpeed")
    return f"zero{stage}"


def _offload(params: str, optimizer: str) -> str:
    return "params" if params == "cpu" else "optimizer" if optimizer == "cpu" else "none"
