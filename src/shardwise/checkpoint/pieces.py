"""Where each strategy keeps the fp32 weights and optimizer state of which part of which parameter.

A `Piece` is a stretch of one flattened parameter inside a tensor that an optimizer moves. DDP holds whole parameters on
every rank; ZeRO-1/2 cut a group of parameters, laid end to end, into one stretch per rank, wherever that falls; ZeRO-3
cuts every parameter by itself. In these terms all of them are the same on disk.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

import torch


class Piece(NamedTuple):
    """Elements [start, start + length) of parameter `name` (flattened, `size` in all) from `offset` on in `owner`."""

    name: str
    size: int
    start: int
    length: int
    owner: torch.Tensor
    offset: int

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same stretch of the owner, or of optimizer state that is laid out like it: a 1-D view."""
        return tensor.detach().view(-1).narrow(0, self.offset, self.length)


class Holder(Protocol):
    """Weights and optimizer of a strategy."""

    optimizer: torch.optim.Optimizer

    def shapes(self) -> dict[str, list[int]]:
        """Of every trained parameter."""

    def saved(self) -> Iterator[Piece]:
        """What this rank writes: over all ranks every element once."""

    def held(self) -> Iterator[Piece]:
        """What this rank needs back."""

    def refresh(self) -> None:
        """Bring what the model computes with up to date with the fp32 weights. Called on every rank."""


class TorchHolder:
    """DDP or one process: every rank holds everything and writes an equal share of each parameter."""

    def __init__(self, module: torch.nn.Module, optimizer: torch.optim.Optimizer, *, rank: int,
                 world_size: int) -> None:
        self.optimizer, self.rank, self.world_size = optimizer, rank, world_size
        self.trained = _trained(module)

    def shapes(self) -> dict[str, list[int]]:
        return {name: list(p.shape) for name, p in self.trained.items()}

    def saved(self) -> Iterator[Piece]:
        for name, p in self.trained.items():
            share = -(-p.numel() // self.world_size)
            start = self.rank * share
            length = min(share, p.numel() - start)
            if length > 0:
                yield Piece(name, p.numel(), start, length, p, start)

    def held(self) -> Iterator[Piece]:
        for name, p in self.trained.items():
            yield Piece(name, p.numel(), 0, p.numel(), p, 0)

    def refresh(self) -> None:
        pass


class ZeroHolder:
    """ZeRO-1 and ZeRO-2, and the optimizer of its own that DeepSpeed has for ZeRO-1 in bf16."""

    def __init__(self, engine: Any) -> None:
        self.zero = engine.optimizer
        self.in_bf16 = not hasattr(self.zero, "single_partition_of_fp32_groups")
        self.optimizer = self.zero.optimizer
        self.trained = _trained(engine.module)

    def shapes(self) -> dict[str, list[int]]:
        return {name: list(p.shape) for name, p in self.trained.items()}

    def saved(self) -> Iterator[Piece]:
        owners = self.zero.fp32_groups_flat_partition if self.in_bf16 else self.zero.single_partition_of_fp32_groups
        for name, p in self.trained.items():
            part: Any = getattr(p, "_hp_mapping", None)
            if part is not None:
                yield Piece(name, p.numel(), part.lp_fragment_address.start, part.lp_fragment_address.numel,
                            owners[part.param_group_index], part.hp_fragment_address.start)

    held = saved

    def refresh(self) -> None:
        self.zero.update_lp_params()
        for group in range(0 if self.in_bf16 else len(self.zero.bit16_groups)):
            self.zero._update_model_bit16_weights(group)


class Zero3Holder:
    """ZeRO-3: partitions of equal size, the last ones filled up."""

    def __init__(self, engine: Any, *, rank: int) -> None:
        self.zero, self.rank = engine.optimizer, rank
        self.optimizer = self.zero.optimizer
        self.trained = _trained(engine.module)

    def shapes(self) -> dict[str, list[int]]:
        return {name: list(p.ds_shape) for name, p in self.trained.items()}

    def saved(self) -> Iterator[Piece]:
        names = {p.ds_id: name for name, p in self.trained.items()}
        for group, owner in zip(self.zero.fp16_groups, self.zero.fp32_partitioned_groups_flat, strict=True):
            offset = 0
            for p in group:
                start = self.rank * p.partition_numel()
                length = min(p.partition_numel(), p.ds_numel - start)
                if length > 0:
                    yield Piece(names[p.ds_id], p.ds_numel, start, length, owner, offset)
                offset += p.partition_numel()

    held = saved

    def refresh(self) -> None:
        self.zero._partition_all_parameters()
        for group in range(len(self.zero.fp16_groups)):
            self.zero._reassign_or_swap_out_partitioned_parameters(group)
        # Small parameters stay whole on every rank between steps.
        kept = self.zero.persistent_parameters
        if kept:
            kept[0].all_gather(kept)


def _trained(module: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    return {name: p for name, p in module.named_parameters() if p.requires_grad}
