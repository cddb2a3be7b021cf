"""Checkpoints as training writes them, made without training: slices of several ranks, through torch's own writer."""

from __future__ import annotations

import hashlib
import json
import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType


class Slice(torch.Tensor):
    """Elements `offset` and on of a flat tensor of `whole` elements."""

    offset: int
    whole: int

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        chunk = ChunkStorageMetadata(torch.Size([self.offset]), self.size())
        return [WriteItem(index=MetadataIndex(fqn, chunk.offsets), type=WriteItemType.SHARD,
                          tensor_data=TensorWriteData(chunk=chunk, size=torch.Size([self.whole]),
                                                      properties=TensorProperties.create_from_tensor(self)))]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        return self.as_subclass(torch.Tensor)


def sliced(values: torch.Tensor, offset: int, whole: int) -> Slice:
    """Mark a rank's elements as such."""
    part = values.as_subclass(Slice)
    part.offset, part.whole = offset, whole
    return part


def save_checkpoint(root: Path, step: int, weights: Mapping[str, torch.Tensor], *, ranks: int = 2,
                    strategy: str = "zero3", **meta: Any) -> Path:
    """`root/step-N` with fp32 weights, each cut over the ranks (the first gets the most), and moments beside them."""
    folder = root / f"step-{step:08d}"
    state = folder / "state"
    state.mkdir(parents=True)
    for rank in range(ranks):
        own: dict[str, Slice] = {}
        for name, tensor in weights.items():
            flat = tensor.detach().float().reshape(-1)
            each = -(-len(flat) // ranks)
            part = flat[rank * each:(rank + 1) * each].clone()
            if len(part):
                own[f"weight/{name}"] = sliced(part, rank * each, len(flat))
                own[f"exp_avg/{name}"] = sliced(torch.full_like(part, 0.5), rank * each, len(flat))
        alone = folder / "alone"
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            dcp.save(own, storage_writer=dcp.HuggingFaceStorageWriter(str(alone), save_distributed=True), no_dist=True)
        written = next(alone.glob("*.safetensors"))
        written.rename(state / f"shard-{rank + 1:05d}-model-00001-of-00001.safetensors")
        shutil.rmtree(alone)
    write_meta(folder, format=2, step=step, strategy=strategy, world_size=ranks, offload="none",
               shapes={name: list(tensor.shape) for name, tensor in weights.items()}, **meta)
    return folder


def write_meta(folder: Path, **meta: Any) -> None:
    """meta.json with the checksums of the files that lie there."""
    files = {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
             for path in sorted(folder.rglob("*.safetensors"))}
    (folder / "meta.json").write_text(json.dumps(meta | {"files": files}))
