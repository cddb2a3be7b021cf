"""How each strategy's weights and optimizer state lie on disk. Nothing is ever unpickled freely."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

WEIGHTS, OPTIMIZER, DEEPSPEED = "trained.safetensors", "optimizer.pt", "deepspeed"


class TorchShards:
    """DDP or one process: rank 0 writes the trained weights and the optimizer state once."""

    def __init__(self, module: torch.nn.Module, optimizer: torch.optim.Optimizer, *, rank: int) -> None:
        self.module, self.optimizer, self.rank = module, optimizer, rank

    def save(self, folder: Path) -> None:
        if self.rank == 0:
            trained = {name: p.detach().contiguous() for name, p in self.module.named_parameters()
                       if p.requires_grad}
            save_file(trained, folder / WEIGHTS)
            torch.save(self.optimizer.state_dict(), folder / OPTIMIZER)

    def load(self, folder: Path) -> None:
        saved = load_file(folder / WEIGHTS)
        with torch.no_grad():
            for name, parameter in self.module.named_parameters():
                if parameter.requires_grad:
                    parameter.copy_(saved.pop(name))
        assert not saved, f"weights of another model: {sorted(saved)[:3]}"
        self.optimizer.load_state_dict(torch.load(folder / OPTIMIZER, weights_only=True, map_location="cpu"))


class DeepSpeedShards:
    """ZeRO: every rank writes its own part, through DeepSpeed; frozen weights stay out."""

    def __init__(self, engine: Any, *, frozen: bool) -> None:
        self.engine, self.frozen = engine, frozen

    def save(self, folder: Path) -> None:
        self.engine.save_checkpoint(str(folder), tag=DEEPSPEED, save_latest=False,
                                    exclude_frozen_parameters=self.frozen)

    def load(self, folder: Path) -> None:
        with _no_free_pickle():
            path, _ = self.engine.load_checkpoint(str(folder), tag=DEEPSPEED,
                                                  load_module_strict=not self.frozen)
        assert path is not None, f"{folder}: DeepSpeed found nothing to load"


@contextlib.contextmanager
def _no_free_pickle() -> Iterator[None]:
    """Within: DeepSpeed's reads are limited to tensors, plain values and its own three state classes."""
    from deepspeed.runtime.checkpoint_engine import torch_checkpoint_engine
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    kind = torch_checkpoint_engine.TorchCheckpointEngine
    free = kind.load

    def load(self: Any, path: str, map_location: Any = None) -> Any:
        with torch.serialization.safe_globals([DynamicLossScaler, LossScaler, ZeroStageEnum, fragment_address]):
            return torch.load(path, map_location=map_location, weights_only=True)

    kind.load = load
    try:
        yield
    finally:
        kind.load = free
