"""Flat slices of tensors, written and read through torch.distributed.checkpoint as safetensors files.

Every tensor is one-dimensional on disk and cut anywhere, so any number of ranks can read what any number wrote. No
pickle is involved: names, sizes and offsets are in the headers of the files (HuggingFaceStorageWriter).
"""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner, LoadPlan, SavePlan
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import ReadItem, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from shardwise.errors import CheckpointError

PLAIN = {"flatten_state_dict": False, "flatten_sharded_tensors": False}
FILE_BYTES = 2 << 30
"""A rank's file is built in memory before it is written, so it is kept below about this size."""


class Slice(NamedTuple):
    """Elements [start, start + len(tensor)) of a flattened tensor of `size` elements."""

    tensor: torch.Tensor
    size: int
    start: int

    def chunk(self) -> ChunkStorageMetadata:
        """Where it lies."""
        return ChunkStorageMetadata(offsets=torch.Size([self.start]), sizes=self.tensor.size())


def write(folder: Path, slices: Mapping[str, Slice], *, group: Any) -> None:
    """Write every rank's slices together, durably. A collective of `group` (None: this process alone).

    Raises RuntimeError on every rank when any of them failed, or when the slices of all ranks together do not make up
    the whole of each tensor.
    """
    writer = _Writer(str(folder), save_distributed=True)
    writer.files = _files(slices)
    try:
        with _quiet(group is None):
            dcp.save(dict(slices), storage_writer=writer, planner=_SavePlanner(**PLAIN), process_group=group,
                     no_dist=group is None)
    except CheckpointException as error:  # no Exception in torch's eyes
        rank, (cause, _) = next(iter(error.failures.items()))
        raise RuntimeError(f"rank {rank}: {type(cause).__name__}: {cause}") from None


class Saved:
    """The slices in a folder, made by any number of ranks; the headers of its files are read once.

    Raises CheckpointError naming a tensor of which elements are missing or there twice: they would be read as
    whatever lay in memory.
    """

    def __init__(self, folder: Path) -> None:
        self._reader = _Reader(str(folder))
        entries = self._reader.read_metadata().state_dict_metadata
        self.sizes: dict[str, int] = {name: entry.size.numel() for name, entry in entries.items()}
        """Elements of every tensor."""
        for name, entry in entries.items():
            _refuse_gaps(folder, name, entry.chunks)

    def read(self, wanted: Mapping[str, Slice]) -> None:
        """Fill the slices' tensors in place, each in its own dtype; each rank reads for itself.

        Raises KeyError for a tensor that is not there, ValueError for one of another size.
        """
        try:
            with _quiet(True):
                dcp.load(dict(wanted), storage_reader=self._reader, planner=_LoadPlanner(**PLAIN), no_dist=True)
        except CheckpointException as error:
            cause, _ = next(iter(error.failures.values()))
            raise cause from None


def _refuse_gaps(folder: Path, name: str, chunks: Iterable[ChunkStorageMetadata]) -> None:
    end = 0
    for offset, length in sorted((chunk.offsets[0], chunk.sizes[0]) for chunk in chunks):
        if offset != end:
            what = "are missing" if offset > end else "are there twice"
            raise CheckpointError(f"{folder}: {name}: elements {min(end, offset):,} to {max(end, offset):,} {what}; "
                                  "choose another checkpoint")
        end = offset + length


def own_files(folder: Path, rank: int) -> list[Path]:
    """The files that `write` made of this rank's slices."""
    return sorted(folder.glob(f"shard-{rank + 1:05d}-*.safetensors"))


@contextlib.contextmanager
def _quiet(alone: bool) -> Iterator[None]:
    """Within: that a process works alone is no reason for torch to warn."""
    with warnings.catch_warnings():
        if alone:
            warnings.simplefilter("ignore")
        yield


def _files(slices: Mapping[str, Slice]) -> dict[str, int]:
    """Tensor -> number of the file, from 1, that holds this rank's slice of it."""
    numbers, total = {}, 0
    for name, piece in slices.items():
        numbers[name] = 1 + total // FILE_BYTES
        total += piece.tensor.nbytes
    return numbers


class _Writer(HuggingFaceStorageWriter):  # type: ignore[misc]
    """Each rank decides for itself which of its files a slice goes to."""

    files: dict[str, int]

    def write_data(self, plan: SavePlan, planner: Any) -> Any:
        own = {**plan.storage_data, "fqn_to_index_mapping": self.files}
        return super().write_data(dataclasses.replace(plan, storage_data=own), planner)


class _Reader(HuggingFaceStorageReader):  # type: ignore[misc]
    """Looks through the headers of all files once; torch would at every load."""

    known: Any = None

    def read_metadata(self) -> Any:
        if self.known is None:
            self.known = super().read_metadata()
        return self.known


class _SavePlanner(DefaultSavePlanner):  # type: ignore[misc]
    """Plans slices; the rest, and the check that they make up whole tensors, is torch's."""

    def create_local_plan(self) -> SavePlan:
        self.plan = SavePlan([_write_item(name, piece) for name, piece in self.state_dict.items()])
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> torch.Tensor:
        tensor: torch.Tensor = self.state_dict[index.fqn].tensor
        return tensor


class _LoadPlanner(DefaultLoadPlanner):  # type: ignore[misc]
    def set_up_planner(self, state_dict: dict[str, Any], metadata: Any = None, is_coordinator: bool = False) -> None:
        self.state_dict, self.metadata, self.is_coordinator = state_dict, metadata, is_coordinator

    def create_local_plan(self) -> LoadPlan:
        items: list[ReadItem] = []
        for name, piece in self.state_dict.items():
            saved = self.metadata.state_dict_metadata[name]
            if saved.size.numel() != piece.size:
                raise ValueError(f"{name} has {saved.size.numel():,} elements there and {piece.size:,} here")
            items += create_read_items_for_chunk_list(name, saved, [piece.chunk()])
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        tensor: torch.Tensor = self.state_dict[index.fqn].tensor
        return tensor


def _write_item(name: str, piece: Slice) -> WriteItem:
    return WriteItem(
        index=MetadataIndex(name, torch.Size([piece.start])), type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(chunk=piece.chunk(), size=torch.Size([piece.size]),
                                    properties=TensorProperties.create_from_tensor(piece.tensor)))
