"""Recipe file + overrides -> Config, with every fault found in one go and each value's origin kept."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, get_type_hints

from ruamel.yaml.nodes import ScalarNode

from shardwise.config import rules
from shardwise.config.document import COMMAND_LINE, Entry, entries_of_file, entries_of_overrides
from shardwise.config.schema import Config
from shardwise.config.values import Misfit, plain, read
from shardwise.errors import ConfigError

FREE = frozenset({"model.from_config"})

# Two ways to say one thing: a flag for one of them beats the file's other one.
ALTERNATIVES = (("schedule.epochs", "schedule.max_steps"), ("schedule.warmup_ratio", "schedule.warmup_steps"),
                ("model.path", "model.from_config"))

# Names used elsewhere for what we call otherwise; only ever suggested, never accepted.
KNOWN_ELSEWHERE = {
    "learning_rate": "optim.lr", "num_train_epochs": "schedule.epochs", "num_epochs": "schedule.epochs",
    "epochs": "schedule.epochs", "max_steps": "schedule.max_steps", "max_seq_length": "data.max_length",
    "seq_len": "data.max_length", "per_device_train_batch_size": "batch.max_tokens_per_micro_batch",
    "micro_batch_size": "batch.max_tokens_per_micro_batch", "micro_batch": "batch.max_tokens_per_micro_batch",
    "gradient_accumulation_steps": "batch.examples_per_step", "global_batch_size": "batch.examples_per_step",
    "train_batch_size": "batch.examples_per_step", "lr": "optim.lr", "lr_scheduler_type": "schedule.kind",
    "max_grad_norm": "optim.max_grad_norm", "gradient_clipping": "optim.max_grad_norm", "bf16": "precision",
    "num_processes": "launch.processes", "num_gpus": "launch.processes", "seed": "run.seed",
    "output_dir": "run.output_dir", "model_name_or_path": "model.path", "lora_r": "adapter.rank",
    "r": "adapter.rank", "target_modules": "adapter.targets", "zero_stage": "strategy",
    "resume_from_checkpoint": "checkpoint.resume", "save_steps": "checkpoint.every_steps",
    "eval_steps": "eval.every_steps", "dataset": "data.train", "deepspeed": "strategy",
}


class Loaded(NamedTuple):
    """A config and, for each dotted key, where its value came from (`default`, FILE:LINE, command line)."""

    config: Config
    origins: dict[str, str]


def leaves(cls: type, prefix: str = "") -> dict[str, Any]:
    """Dotted key -> type hint for every setting beneath a dataclass."""
    found: dict[str, Any] = {}
    for name, hint in get_type_hints(cls, include_extras=True).items():
        if dataclasses.is_dataclass(hint) and isinstance(hint, type):
            found.update(leaves(hint, f"{prefix}{name}."))
        else:
            found[prefix + name] = hint
    return found


LEAVES = leaves(Config)
SECTIONS = frozenset(key.rsplit(".", 1)[0] for key in LEAVES if "." in key)


def load(recipe: str | Path, overrides: Sequence[str] = ()) -> Loaded:
    """Read a recipe with its overrides; a flag beats the file beats the default.

    Raises ConfigError listing every fault: what, the value, where, and the way out.
    """
    faults: list[str] = []
    entries: list[Entry] = []
    try:
        entries.extend(entries_of_file(Path(recipe), SECTIONS, FREE, faults))
    except ConfigError as error:
        raise ConfigError([*error.faults, *faults]) from None
    entries.extend(entries_of_overrides(overrides, faults))
    values: dict[str, Any] = {}
    origins = dict.fromkeys(LEAVES, "default")
    for entry in entries:
        if entry.key not in LEAVES:
            faults.append(_unknown(entry))
            continue
        try:
            values[entry.key] = read(entry.node, LEAVES[entry.key])
            origins[entry.key] = entry.place
        except Misfit as misfit:
            shown = _shown(entry)
            faults.append(f"{entry.place}: {entry.key}={shown} must be {misfit}")
    _flag_beats_file(values, origins)
    config = _build(Config, values, "")
    faults.extend(rules.faults(_with_names(config, recipe), origins))
    if faults:
        raise ConfigError(list(dict.fromkeys(faults)))
    return Loaded(_with_names(config, recipe), origins)


def _flag_beats_file(values: dict[str, Any], origins: dict[str, str]) -> None:
    for pair in ALTERNATIVES:
        for flag, filed in (pair, pair[::-1]):
            if origins[flag] == COMMAND_LINE and values[flag] is not None \
                    and origins[filed] not in (COMMAND_LINE, "default"):
                values.pop(filed)
                origins[filed] = f"unset by {flag} on the command line"


def _build(cls: type, values: dict[str, Any], prefix: str) -> Any:
    given: dict[str, Any] = {}
    for name, hint in get_type_hints(cls, include_extras=True).items():
        key = prefix + name
        if dataclasses.is_dataclass(hint) and isinstance(hint, type):
            given[name] = _build(hint, values, key + ".")
        elif key in values:
            given[name] = values[key]
    return cls(**given)


def _with_names(config: Config, recipe: str | Path) -> Config:
    name = config.run.name or Path(recipe).stem
    output = config.run.output_dir or f"runs/{name}"
    return dataclasses.replace(config, run=dataclasses.replace(config.run, name=name, output_dir=output))


def _shown(entry: Entry) -> str:
    if isinstance(entry.node, ScalarNode):
        return str(entry.node.value) or "(nothing)"
    return str(plain(entry.node))


def _unknown(entry: Entry) -> str:
    leaf = entry.key.rsplit(".", 1)[-1]
    if entry.key in SECTIONS:
        keys = ", ".join(key for key in LEAVES if key.startswith(entry.key + "."))
        return f"{entry.place}: {entry.key!r} is a section; set one of {keys}"
    if entry.place == COMMAND_LINE and leaf == "no_" + leaf.removeprefix("no_"):
        positive = entry.key.replace("no_", "", 1)
        if positive in LEAVES:
            return f"{entry.place}: unknown key {entry.key!r}; did you mean '{positive}=false'?"
    return f"{entry.place}: unknown key {entry.key!r}; did you mean {nearest(entry.key)!r}?"


def nearest(key: str) -> str:
    """The setting most likely meant by an unknown dotted key."""
    leaf = key.rsplit(".", 1)[-1]
    for name in (leaf, *difflib.get_close_matches(leaf, KNOWN_ELSEWHERE, n=1, cutoff=0.85)):
        if name in KNOWN_ELSEWHERE:
            return KNOWN_ELSEWHERE[name]
    same_leaf = [known for known in LEAVES if known.rsplit(".", 1)[-1] == leaf]
    return (same_leaf or difflib.get_close_matches(key, LEAVES, n=1, cutoff=0.0))[0]
