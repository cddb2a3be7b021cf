"""Weights and tokenizer, by the same path for every strategy."""

from __future__ import annotations

import hashlib
import inspect
import json
import os
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock

from shardwise import demo
from shardwise.config.resolve import Resolved
from shardwise.config.schema import ModelConfig
from shardwise.errors import ConfigError


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


def load_model(resolved: Resolved, *, vocabulary: int) -> torch.nn.Module:
    """The causal LM with fp32 weights where they are trained. Raises ConfigError when it cannot be used.

    Under zero3 the accelerator's DeepSpeed plugin makes transformers load each rank's part only.
    """
    from transformers import AutoModelForCausalLM

    config = resolved.config
    name = demo.resolve(config.model.path) if config.model.path else str(fresh_folder(resolved))
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
        model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
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


def fresh_folder(resolved: Resolved) -> Path:
    """Where the run keeps its freshly drawn initial weights: a folder for each seed, model and tokenizer.

    A start that was killed before its first checkpoint must not lend its weights to one with another seed.
    """
    drawn = [resolved.config.run.seed, resolved.config.model.from_config, resolved.config.model.tokenizer]
    key = hashlib.sha256(json.dumps(drawn, sort_keys=True).encode()).hexdigest()[:8]
    return Path(resolved.config.run.output_dir or "") / f"init-{key}"


def draw_fresh(resolved: Resolved, *, vocabulary: int) -> None:
    """Draw the weights of `model.from_config` into the run folder, on whichever rank of a node comes first.

    All ranks then load them like any other model, so they do not depend on the number of ranks or the
    strategy. To be called before the accelerator exists: under zero3 making a model is a collective.
    Raises ConfigError for a configuration that transformers refuses.
    """
    if resolved.config.model.from_config is None:
        return
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = fresh_folder(resolved)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):
        if (folder / "config.json").is_file():
            return
        fields = {"vocab_size": vocabulary, **resolved.config.model.from_config}
        try:
            config = AutoConfig.for_model(fields.pop("model_type"), **fields)
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(resolved.config.run.seed)
                model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        except (ValueError, TypeError) as error:
            raise ConfigError(f"{resolved.origins['model.from_config']}: model.from_config: {error}") from None
        beside = folder.with_name(f"{folder.name}.{os.getpid()}.part")
        model.save_pretrained(beside)
        os.replace(beside, folder)
