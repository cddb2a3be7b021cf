"""Weights and tokenizer, by the same path for every strategy."""

from __future__ import annotations

import hashlib
import inspect
import json
import os
from pathlib import Path

import torch
from filelock import FileLock

from shardwise import demo
from shardwise.config.resolve import Resolved
from shardwise.config.schema import Config
from shardwise.data.tokenizer import place_of
from shardwise.errors import ConfigError


def load_model(resolved: Resolved, *, vocabulary: int) -> torch.nn.Module:
    """The causal LM with fp32 weights where they are trained. Raises ConfigError when it cannot be used.

    Under zero3 the accelerator's DeepSpeed plugin makes transformers load each rank's part only.
    """
    from transformers import AutoModelForCausalLM

    config = resolved.config
    name = demo.resolve(config.model.path) if config.model.path else str(fresh_folder(resolved))
    try:
        model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(
            **place_of(name), dtype=held_dtype(config), attn_implementation=resolved.attention,
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


def held_dtype(config: Config) -> torch.dtype:
    """fp32 for weights that are trained; a frozen base may be held in bf16."""
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
