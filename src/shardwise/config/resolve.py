"""A config, the launcher's choices and the number of ranks -> every derived number, decided once."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from shardwise.config.deepspeed import deepspeed_dict, zero_file
from shardwise.config.launcher import Launcher
from shardwise.config.load import Loaded
from shardwise.config.schema import Config
from shardwise.config.values import duration_seconds
from shardwise.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class Resolved:
    """What a run works with: nothing in it is "auto" but `data.packing`, which a probe of the model decides."""

    config: Config
    origins: dict[str, str]
    strategy: str
    offload: str
    world_size: int
    max_tokens_per_micro_batch: int
    gradient_checkpointing: bool
    attention: str
    time_limit_seconds: int | None
    deepspeed: dict[str, Any] | None
    """The whole DeepSpeed configuration; None for ddp."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepPlan:
    """Optimizer steps of a run: the schedule's horizon, the loop's length and what is printed."""

    examples: int | None
    """Of the first epoch; with fractional source weights the others differ from it by rounding. None for a stream."""
    steps_per_epoch: int | None
    """Of the first epoch."""
    num_steps: int
    warmup_steps: int


def resolve(loaded: Loaded, *, world_size: int, launcher: Launcher) -> Resolved:
    """Settle strategy, offload, batch and the DeepSpeed dict. Raises ConfigError on contradictions."""
    config = loaded.config
    strategy = _agreed("strategy", config.strategy, launcher.strategy, loaded.origins) or "ddp"
    offload: str = config.offload
    if launcher.offload is not None and offload != launcher.offload:
        if loaded.origins["offload"] != "default":
            raise ConfigError(f"{loaded.origins['offload']}: offload={offload} contradicts the launcher, which was "
                              f"started with offload {launcher.offload}; change one of them")
        offload = launcher.offload
    _offload_fits(strategy, offload, loaded.origins["offload"])
    limit = config.batch.max_tokens_per_micro_batch
    checkpointing = config.model.gradient_checkpointing
    deepspeed = None
    if strategy != "ddp":
        path = launcher.deepspeed_file or zero_file(strategy, offload)
        deepspeed = deepspeed_dict(path, strategy=strategy, offload=offload, precision=config.precision,
                                   optimizer=config.optim.name, max_grad_norm=config.optim.max_grad_norm,
                                   world_size=world_size)
    return Resolved(
        config=config, origins=loaded.origins, strategy=strategy, offload=offload, world_size=world_size,
        max_tokens_per_micro_batch=config.data.max_length if limit == "auto" else limit,
        gradient_checkpointing=offload == "params" if checkpointing == "auto" else checkpointing,
        attention="sdpa" if config.model.attention == "auto" else config.model.attention,
        time_limit_seconds=duration_seconds(config.run.time_limit) if config.run.time_limit else None,
        deepspeed=deepspeed)


def _agreed(key: str, asked: str, started: str | None, origins: dict[str, str]) -> str | None:
    if asked == "auto":
        return started
    if started is not None and asked != started:
        raise ConfigError(f"{origins[key]}: {key}={asked} contradicts the launcher, which was started with {started}; "
                          f"use accelerate_configs/{asked}.yaml, or {key}=auto to follow the launcher")
    return asked


def _offload_fits(strategy: str, offload: str, origin: str) -> None:
    if offload == "optimizer" and strategy == "ddp":
        raise ConfigError(f"{origin}: offload=optimizer needs strategy zero1, zero2 or zero3; set strategy=zero2, say")
    if offload == "params" and strategy != "zero3":
        raise ConfigError(f"{origin}: offload=params needs strategy=zero3, not {strategy}")


def plan_steps(config: Config, epoch_examples: Callable[[int], int] | None) -> StepPlan:
    """Steps of a run; the last, shorter step of an epoch counts as one.

    `epoch_examples(epoch)` is how many examples that epoch (from 0) trains on; None for a stream, of which that is
    not known and which therefore needs `schedule.max_steps`.
    """
    schedule = config.schedule
    if epoch_examples is None:
        assert schedule.max_steps is not None, "config/rules.py asks for it"
        return StepPlan(examples=None, steps_per_epoch=None, num_steps=schedule.max_steps,
                        warmup_steps=_warmup(config, schedule.max_steps))
    counted = epoch_examples

    def steps_of(epoch: int) -> int:
        return math.ceil(counted(epoch) / config.batch.examples_per_step)

    if counted(0) == 0:
        raise ConfigError("data.train holds no usable example for the first epoch; nothing can be trained")
    num_steps = schedule.max_steps or max(1, _steps_in(schedule.epochs or 1, steps_of))
    return StepPlan(examples=counted(0), steps_per_epoch=steps_of(0), num_steps=num_steps,
                    warmup_steps=_warmup(config, num_steps))


def _warmup(config: Config, num_steps: int) -> int:
    schedule = config.schedule
    warmup = schedule.warmup_steps
    if warmup is None:
        warmup = math.ceil(num_steps * (schedule.warmup_ratio or 0.0) - 1e-9)
    if warmup > num_steps:
        raise ConfigError(f"schedule.warmup_steps={warmup} is more than the {num_steps} steps of this run; "
                          "the peak would never be reached")
    return warmup


def _steps_in(epochs: float, steps_of: Callable[[int], int]) -> int:
    whole = math.floor(epochs)
    rest = math.ceil((epochs - whole) * steps_of(whole) - 1e-9)  # 1.1 - 1 is a little more than a tenth
    return sum(map(steps_of, range(whole))) + rest


def as_tree(config: Config) -> dict[str, Any]:
    """The config as plain nested dicts and lists, for resolved.yaml and trackers."""
    tree: dict[str, Any] = _plain(dataclasses.asdict(config))
    return tree


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    return value
