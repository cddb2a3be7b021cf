"""LoRA through PEFT: where it goes is checked name by name."""

from __future__ import annotations

from typing import Any

import torch

from shardwise.config.schema import AdapterConfig
from shardwise.errors import ConfigError


def add_adapter(model: torch.nn.Module, adapter: AdapterConfig) -> torch.nn.Module:
    """Wrap a model so that only low-rank matrices (and `modules_to_save`) are trained, in fp32.

    Raises ConfigError for a target that matches no module, even when others do.
    """
    if adapter.kind == "none":
        return model
    from peft import LoraConfig, get_peft_model

    names = [name for name, _ in model.named_modules()]
    for key, wanted in (("adapter.targets", adapter.targets), ("adapter.modules_to_save", adapter.modules_to_save)):
        missing = [w for w in wanted if not any(n == w or n.endswith("." + w) for n in names)]
        if missing:
            raise ConfigError(f"{key}: {', '.join(map(repr, missing))} matches no module of {type(model).__name__}; "
                              f"linear modules are {', '.join(_linear_names(model))}")
    wrapped: Any = get_peft_model(model, LoraConfig(
        r=adapter.rank, lora_alpha=adapter.alpha, lora_dropout=adapter.dropout, task_type="CAUSAL_LM",
        target_modules=list(adapter.targets), modules_to_save=list(adapter.modules_to_save) or None))
    for parameter in wrapped.parameters():
        # DeepSpeed keeps fp32 masters itself; elsewhere a bf16 weight would lose every small update.
        if parameter.requires_grad and not hasattr(parameter, "ds_id"):
            parameter.data = parameter.data.float()
    return wrapped


def _linear_names(model: torch.nn.Module) -> list[str]:
    return sorted({name.rsplit(".", 1)[-1] for name, module in model.named_modules()
                   if isinstance(module, torch.nn.Linear)})
