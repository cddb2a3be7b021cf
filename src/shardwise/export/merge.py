"""An adapter merged into the weights it was trained on: round(W + scale * B @ A), summed in fp32, rounded once."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch

from shardwise.config.schema import Config
from shardwise.data.tokenizer import place_of
from shardwise.errors import CheckpointError
from shardwise.export import base as base_weights
from shardwise.export.runs import Run, read_record
from shardwise.model.adapters import add_adapter
from shardwise.model.load import held_dtype


def base_name(run: Run) -> str:
    """Where the run's base model lies, as from_pretrained takes it."""
    recorded = run.manifest.get("base") or {"path": run.config.model.path}
    return run.seen_from_start(recorded["path"])


def refuse_other_base(run: Run, name: str) -> None:
    """Raises CheckpointError unless the weights at `name` are those the run started from, and not quantised."""
    recorded = run.manifest.get("base")
    if not recorded:
        raise CheckpointError(f"{run.folder}: its manifest has no fingerprint of the base model, so nothing proves "
                              f"that {name} is what the adapter was trained on; export it without --merge-lora")
    try:
        method = base_weights.quantisation(name)
        if method is not None:
            raise CheckpointError(f"the base model {name} is quantised ({method}): a merged weight would be rounded to "
                                  "a few bits and be another model than the one trained; give the base it was made "
                                  "from, or export the adapter without --merge-lora")
        found = base_weights.fingerprint(name)
    except OSError as error:
        raise CheckpointError(f"the base model {name} is not there: {error}; put it back, or export the adapter "
                              "without --merge-lora") from None
    if found["sha256"] != recorded["sha256"]:
        merged = read_record(Path(name)).get("merged")
        why = "it holds a merged adapter already, and merging twice would add it twice" if merged else \
            "an adapter is right on the weights it was trained on only"
        raise CheckpointError(f"the base model {name} has other weights ({found['sha256'][:12]}..., "
                              f"{found['bytes']:,} bytes) than when the run started ({recorded['sha256'][:12]}..., "
                              f"{recorded['bytes']:,} bytes): {why}; put the old ones back")


def load_base(run: Run, name: str, *, strategy: str) -> Any:
    """The base with the values that training saw: its config from the skeleton, its dtype as it was held."""
    from transformers import AutoConfig, AutoModelForCausalLM

    trust = run.config.model.trust_remote_code
    return AutoModelForCausalLM.from_pretrained(
        **place_of(name), dtype=seen_dtype(run.config, strategy), trust_remote_code=trust,
        config=AutoConfig.from_pretrained(run.skeleton, trust_remote_code=trust))


def seen_dtype(config: Config, strategy: str) -> torch.dtype:
    """The dtype a frozen base was held in; DeepSpeed casts it to that of the arithmetic."""
    computed = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[config.precision]
    return held_dtype(config) if strategy == "ddp" or computed == torch.float32 else computed


def merge(base: Any, run: Run, trained: dict[str, torch.Tensor], *, dtype: torch.dtype) -> Any:
    """The base model (used up) with an adapter merged and its trained modules in place, in `dtype`.

    `trained`: fp32 weights by their names in the adapted model. Where a tied pair no longer is one (one of them
    was trained), config.tie_word_embeddings says so.
    """
    from peft.tuners.lora import LoraLayer

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about ties, which are dealt with below
        wrapped: Any = add_adapter(base, run.config.adapter)
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if parameter.requires_grad:
                parameter.copy_(trained[name])
        for layer in wrapped.modules():
            if isinstance(layer, LoraLayer):
                inner: Any = layer.get_base_layer()
                summed = inner.weight.float() + layer.get_delta_weight("default").float()
                # A parameter of its own: what it was tied to stays as it is.
                inner.weight = torch.nn.Parameter(summed.to(dtype), requires_grad=False)
    model = wrapped.unload().to(dtype)
    if getattr(model.config, "tie_word_embeddings", False):
        model.config.tie_word_embeddings = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    return model
