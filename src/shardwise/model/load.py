"""Weights and tokenizer, by the same path for every strategy."""

from __future__ import annotations

import contextlib
import inspect
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock

from shardwise import demo
from shardwise.config.resolve import Resolved
from shardwise.config.schema import ModelConfig
from shardwise.errors import ConfigError, UserError


def load_tokenizer(model: ModelConfig) -> Any:
    """The fast tokenizer of a model. Raises ConfigError when there is none."""
    from transformers import AutoTokenizer

    name = demo.resolve(model.tokenizer or model.path or "")
    try:
        tokenizer = AutoTokenizer.from_pretrained(**_place(name), trust_remote_code=model.trust_remote_code)
    except Exception as error:  # many kinds, all about this name
        raise ConfigError(f"no tokenizer can be loaded from {name!r}: {error}") from None
    if not tokenizer.is_fast:
        raise ConfigError(f"the tokenizer of {name!r} is not a fast one; masks need its character offsets")
    return tokenizer


def _place(name: str) -> dict[str, str]:
    """from_pretrained's arguments for a folder, a hub name or a .gguf file."""
    path = Path(name)
    if path.suffix == ".gguf":
        return {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    return {"pretrained_model_name_or_path": name}


@contextlib.contextmanager
def partitioned(resolved: Resolved) -> Iterator[None]:
    """Within: under zero3 each rank keeps only its part of every weight from the moment it is made."""
    if resolved.strategy != "zero3":
        yield
        return
    from transformers.integrations import HfDeepSpeedConfig, unset_hf_deepspeed_config

    keep_alive = HfDeepSpeedConfig(resolved.deepspeed)
    try:
        yield
    finally:
        unset_hf_deepspeed_config()
        del keep_alive


def load_model(resolved: Resolved, *, vocabulary: int) -> torch.nn.Module:
    """The causal LM with fp32 weights where they are trained. Raises ConfigError when it cannot be used.

    Fresh weights (`model.from_config`) are made once, on one rank, and loaded by all like any other model,
    so they do not depend on the number of ranks or the strategy.
    """
    from transformers import AutoModelForCausalLM

    config = resolved.config
    name = demo.resolve(config.model.path) if config.model.path else str(_fresh(resolved, vocabulary))
    with partitioned(resolved):
        try:
            model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(
                **_place(name), dtype=held_dtype(resolved), attn_implementation=resolved.attention,
                trust_remote_code=config.model.trust_remote_code)
        except (OSError, ValueError, ImportError) as error:
            raise ConfigError(f"no model can be loaded from {name!r}: {error}") from None
    if "logits_to_keep" not in inspect.signature(model.forward).parameters:
        raise ConfigError(f"{type(model).__name__} cannot compute logits at chosen positions (no logits_to_keep); "
                          "choose a model of a current transformers causal LM family")
    if hasattr(model.config, "quantization_config"):
        raise ConfigError(f"{name!r} is quantised and cannot be trained as it is; give the unquantised model")
    if vocabulary > model.config.vocab_size:
        raise ConfigError(f"the tokenizer has {vocabulary} tokens but the model's vocabulary is "
                          f"{model.config.vocab_size}; give the tokenizer that belongs to the model")
    if resolved.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        if config.adapter.kind != "none":
            model.enable_input_require_grads()
    return model


def held_dtype(resolved: Resolved) -> torch.dtype:
    """fp32 for weights that are trained; a frozen base may be held in bf16."""
    config = resolved.config
    frozen = config.adapter.kind != "none"
    if config.model.dtype == "bf16" or (config.model.dtype == "auto" and frozen and config.precision == "bf16"):
        return torch.bfloat16
    return torch.float32


def _fresh(resolved: Resolved, vocabulary: int) -> Path:
    """The folder of freshly drawn weights in the run folder, drawn by whichever rank comes first."""
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = Path(resolved.config.run.output_dir or "") / "init"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):
        if (folder / "config.json").is_file():
            return folder
        fields = dict(resolved.config.model.from_config or {})
        fields.setdefault("vocab_size", vocabulary)
        try:
            config = AutoConfig.for_model(fields.pop("model_type"), **fields)
        except (ValueError, TypeError) as error:
            raise ConfigError(f"{resolved.origins['model.from_config']}: model.from_config: {error}") from None
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(resolved.config.run.seed)
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        beside = folder.with_name(f"init.{os.getpid()}.part")
        model.save_pretrained(beside)
        if folder.exists():
            raise UserError(f"{folder} exists but is not a model folder; remove it")
        os.replace(beside, folder)
    return folder
