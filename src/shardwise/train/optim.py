"""The optimizer: decay on matrices only, fused where torch has it."""

from __future__ import annotations

import torch

from shardwise.config.schema import OptimConfig


def parameter_groups(model: torch.nn.Module, weight_decay: float) -> list[dict[str, object]]:
    """Trainable parameters in two groups: with decay, and without (biases, norms: fewer than two dimensions)."""
    decay: list[torch.nn.Parameter] = []
    plain: list[torch.nn.Parameter] = []
    for parameter in model.parameters():
        if parameter.requires_grad:
            # Under zero3 a weight is an empty shell that remembers its shape.
            shape = getattr(parameter, "ds_shape", parameter.shape)
            (decay if len(shape) >= 2 else plain).append(parameter)
    groups: list[dict[str, object]] = [{"params": decay, "weight_decay": weight_decay},
                                       {"params": plain, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def make_optimizer(model: torch.nn.Module, config: OptimConfig, *, fused: bool) -> torch.optim.Optimizer:
    """AdamW or SGD over a model's trainable parameters; `fused` asks for torch's one-kernel step."""
    groups = parameter_groups(model, config.weight_decay)
    if config.name == "sgd":
        return torch.optim.SGD(groups, lr=config.lr, momentum=config.momentum, fused=fused)
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=fused)
