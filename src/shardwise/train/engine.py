"""The two ways a step is carried out: DDP (or one process) and DeepSpeed. Both take sums and one global scale.

`micro_step` runs one forward and backward; gradients are communicated at the last one only. `apply` clips by
the global norm once, moves the weights, and returns the norm from before clipping.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, Protocol

import torch

LossFn = Callable[[], torch.Tensor]


class Engine(Protocol):
    """What the loop needs to know of a strategy."""

    model: torch.nn.Module
    """Called for the forward pass."""
    module: torch.nn.Module
    """The bare model inside."""

    def micro_step(self, loss: LossFn, *, last: bool) -> None:
        """Forward and backward of a loss already scaled by world_size / global count."""

    def apply(self, lr: float) -> float:
        """Clip, step, clear the gradients; returns the global gradient norm before clipping."""

    def discard(self) -> None:
        """Forget the gradients of this step."""


class TorchEngine:
    """DDP over any number of ranks; a single process is the case without communication."""

    def __init__(self, model: torch.nn.Module, module: torch.nn.Module, optimizer: torch.optim.Optimizer, *,
                 max_grad_norm: float | None, autocast: Callable[[], Any]) -> None:
        self.model, self.module, self.optimizer = model, module, optimizer
        self.max_grad_norm, self.autocast = max_grad_norm, autocast
        self.parameters = [p for p in module.parameters() if p.requires_grad]

    def micro_step(self, loss: LossFn, *, last: bool) -> None:
        no_sync = getattr(self.model, "no_sync", None)
        # Around forward too: DDP decides there whether the backward will communicate.
        with contextlib.nullcontext() if last or no_sync is None else no_sync():
            with self.autocast():
                value = loss()
            value.backward()

    def apply(self, lr: float) -> float:
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        if self.max_grad_norm is not None:
            torch.nn.utils.clip_grads_with_norm_(self.parameters, self.max_grad_norm, norm)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.discard()
        return float(norm.item())

    def discard(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)


class DeepSpeedEngine:
    """ZeRO-1/2/3. The engine clips and steps itself; we tell it which micro-step is the last."""

    def __init__(self, engine: Any) -> None:
        self.engine = self.model = engine
        self.module = engine.module

    def micro_step(self, loss: LossFn, *, last: bool) -> None:
        self.engine.set_gradient_accumulation_boundary(last)
        self.engine.backward(loss())

    def apply(self, lr: float) -> float:
        for group in self.engine.optimizer.param_groups:
            group["lr"] = lr
        self.engine.step()
        norm = self.engine.get_global_grad_norm()
        return float(norm.item() if hasattr(norm, "item") else norm)

    def discard(self) -> None:
        self.engine.optimizer.zero_grad()
