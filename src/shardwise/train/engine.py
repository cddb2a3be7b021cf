"""The two ways a step is carried out: DDP (or one process) and DeepSpeed. Both take sums and one global scale.

`micro_step` runs one forward and backward; gradients are communicated at the last one only. `apply` asks whether the
step may happen once the global norm is known, then clips by it once and moves the weights, or moves nothing.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any, Protocol

import torch

from shardwise.train.loss_scale import LossScale

LossFn = Callable[[], torch.Tensor]
Allow = Callable[[float], bool]
"""Told the global gradient norm, says whether the weights may move; the same on every rank."""


class Engine(Protocol):
    """What the loop needs to know of a strategy."""

    model: torch.nn.Module
    """Called for the forward pass."""
    module: torch.nn.Module
    """The bare model inside."""
    scale: LossScale | None
    """Under fp16."""
    committed: bool
    """True while a micro-step that fails could not be made up for: others may wait for this rank in a collective."""

    def micro_step(self, loss: LossFn, *, last: bool) -> None:
        """Forward and backward of a loss already scaled by world_size / global count."""

    def apply(self, lr: float, allow: Allow = math.isfinite) -> float:
        """The global gradient norm before clipping; clips, steps and clears the gradients.

        `allow` is asked exactly once, between the norm and the optimizer. Where it says no, weights and optimizer
        state stay as they are to the last bit, and the gradients are forgotten. A norm of inf or NaN must be refused.
        """

    def discard(self) -> None:
        """Forget the gradients of a step whose micro-steps are done; every rank must call it."""


class TorchEngine:
    """DDP over any number of ranks; a single process is the case without communication."""

    def __init__(self, model: torch.nn.Module, module: torch.nn.Module, optimizer: torch.optim.Optimizer, *,
                 max_grad_norm: float | None, autocast: Callable[[], Any], scale: LossScale | None = None) -> None:
        self.model, self.module, self.optimizer = model, module, optimizer
        self.max_grad_norm, self.autocast, self.scale = max_grad_norm, autocast, scale
        self.parameters = [p for p in module.parameters() if p.requires_grad]
        self.committed = False

    def micro_step(self, loss: LossFn, *, last: bool) -> None:
        self.committed = False
        no_sync = getattr(self.model, "no_sync", None)
        # Around forward too: DDP decides there whether the backward will communicate.
        with contextlib.nullcontext() if last or no_sync is None else no_sync():
            with self.autocast():
                value = loss()
            self.committed = last and no_sync is not None
            (value if self.scale is None else value * self.scale.value).backward()

    def apply(self, lr: float, allow: Allow = math.isfinite) -> float:
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        if self.scale is not None:
            torch._foreach_mul_(gradients, 1.0 / self.scale.value)
        total = torch.nn.utils.get_total_norm(gradients)
        norm = float(total.item())  # host sync: nothing may move before this is known
        if allow(norm):
            if self.max_grad_norm is not None:
                torch.nn.utils.clip_grads_with_norm_(self.parameters, self.max_grad_norm, total)
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            self.optimizer.step()
        self.discard()
        return norm

    def discard(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)


class DeepSpeedEngine:
    """ZeRO-1/2/3. The engine clips and steps itself; we tell it which micro-step is the last.

    Its optimizer computes the norm inside `step()` and throws a step away when that is not finite. `_decide` is put
    behind the norm and turns a refusal into such a norm, so that a refused step takes DeepSpeed's own way out.
    """

    def __init__(self, engine: Any, *, scale: LossScale | None = None) -> None:
        self.engine = self.model = engine
        self.module, self.scale = engine.module, scale
        self.committed = False
        self._allow: Allow = math.isfinite
        self._norm, self._refused = math.nan, False
        optimizer = engine.optimizer
        self._gathers = hasattr(optimizer, "_get_norm_groups")
        """zero3: collectives in the forward pass too."""
        # The norm is not finite exactly when a gradient is not; looking first would leave the question unasked.
        optimizer.check_overflow = lambda *_, **__: None
        if self._gathers:
            groups_of = optimizer._get_norm_groups
            optimizer._get_norm_groups = lambda: self._decided(groups_of())
        elif hasattr(optimizer, "scaled_global_norm"):  # zero1 and zero2
            norm_of = optimizer.scaled_global_norm
            optimizer.scaled_global_norm = lambda *args, **more: self._decided([norm_of(*args, **more)])[0]
        else:
            self._decide_in_bf16(optimizer)

    def _decide_in_bf16(self, optimizer: Any) -> None:
        """zero1 in bf16 has an optimizer of its own, whose norm is that of what `get_grads_for_norm` returns."""
        from deepspeed.runtime.utils import get_global_norm_of_tensors

        gradients_of = optimizer.get_grads_for_norm

        def gradients(for_clipping: bool = False) -> Any:
            if for_clipping:
                return gradients_of(for_clipping=True)
            own, experts = gradients_of()
            return self._decided([get_global_norm_of_tensors(own, mpu=optimizer.mpu)]), experts

        optimizer.get_grads_for_norm = gradients

    def _decided(self, norms: list[torch.Tensor]) -> list[torch.Tensor]:
        from deepspeed.runtime.utils import combine_grad_norm_groups

        total = float(combine_grad_norm_groups(norms))
        self._norm = total if self.scale is None else total / self.scale.value
        self._refused = not self._allow(self._norm)
        return [torch.full_like(norms[0], math.inf)] if self._refused else norms

    def micro_step(self, loss: LossFn, *, last: bool) -> None:
        self.committed = self._gathers
        self.engine.set_gradient_accumulation_boundary(last)
        if self.scale is not None:
            self.engine.optimizer.override_loss_scale(self.scale.value)
        value = loss()
        self.committed = True  # ZeRO-2 communicates in every backward, and none can be broken off half-way
        self.engine.backward(value)

    def apply(self, lr: float, allow: Allow = math.isfinite) -> float:
        for group in self.engine.optimizer.param_groups:
            group["lr"] = lr
        self._allow = allow
        self.engine.step()
        if self._refused:
            # Under offload DeepSpeed 0.19.8 leaves its low-precision gradients behind and would add the next to them.
            left = getattr(self.engine.optimizer, "averaged_gradients", {})
            left.update(dict.fromkeys(left))
        return self._norm

    def discard(self) -> None:
        self.apply(0.0, lambda _: False)
