"""Facts about this rank, and the few agreements ranks make with each other."""

from __future__ import annotations

import datetime
import os
import socket
from collections.abc import Mapping, MutableMapping
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from shardwise.errors import PreflightError

T = TypeVar("T")
MEETING_TIMEOUT = datetime.timedelta(hours=24)
"""How long ranks wait for each other's set-up; the launchers see to those that die in it."""


class Ranks(NamedTuple):
    """Who this process is, from the variables every launcher sets (alone: rank 0 of 1)."""

    rank: int
    local_rank: int
    world_size: int

    @property
    def main(self) -> bool:
        """True on the one rank that writes files and talks."""
        return self.rank == 0


def ranks_of(env: Mapping[str, str]) -> Ranks:
    """Read RANK, LOCAL_RANK and WORLD_SIZE; everything is keyed on RANK, never on a node's number."""
    return Ranks(int(env.get("RANK", "0")), int(env.get("LOCAL_RANK", "0")), int(env.get("WORLD_SIZE", "1")))


def stand_alone(env: MutableMapping[str, str]) -> None:
    """Give a process that no launcher started the variables of rank 0 of 1, which DeepSpeed needs."""
    if "RANK" not in env:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        env.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1", MASTER_ADDR="127.0.0.1",
                   MASTER_PORT=str(port))


def check_world_size(ranks: Ranks, asked: int | None, *, gpus: int, env: Mapping[str, str]) -> None:
    """Refuse a world other than the one asked for, and more local ranks than GPUs. Raises PreflightError."""
    if asked is not None and asked != ranks.world_size:
        raise PreflightError(
            f"{asked} processes were asked for, but the launcher started {ranks.world_size}; start with ./launch.sh, "
            "or torchrun --nproc_per_node, or accelerate launch with accelerate_configs/ddp.yaml (a MULTI_CPU "
            "configuration and --cpu start a single process), or leave launch.processes=auto")
    local = int(env.get("LOCAL_WORLD_SIZE", "1"))
    if 0 < gpus < local:
        raise PreflightError(f"{local} processes on this node, but {gpus} visible GPU{'s' * (gpus > 1)}; start at most "
                             "one per GPU (see CUDA_VISIBLE_DEVICES)")


def sum_over_ranks(values: torch.Tensor) -> torch.Tensor:
    """Elementwise sum over all ranks (in place where there are several)."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(values)
    return values


def second_group() -> Any:
    """A group of all ranks beside the main one, over the network of the hosts; None for one process alone.

    For words between ranks, and for the thread that saves: two threads must not share a group. The first call is
    collective.
    """
    global _second
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    world, group = _second
    if world is not dist.group.WORLD:
        group = dist.new_group(backend="gloo")
        _second = dist.group.WORLD, group
    return group


_second: tuple[Any, Any] = (None, None)


def gathered(mine: T, group: Any) -> list[T]:
    """What every rank of a group gave, by rank, on every rank; plain Python objects."""
    if group is None:
        return [mine]
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, mine, group=group)
    return everyone


def agree(facts: dict[str, Any]) -> None:
    """Refuse to go on unless all ranks hold the same facts. Raises PreflightError naming key and ranks."""
    everyone = gathered(facts, second_group())
    for key in facts:
        other = next((r for r in range(len(everyone)) if everyone[r].get(key) != everyone[0].get(key)), None)
        if other is not None:
            raise PreflightError(f"ranks disagree on {key}: rank 0 has {everyone[0].get(key)!r}, rank {other} has "
                                 f"{everyone[other].get(key)!r}; give every node the same recipe, data and code")


def limit_waits(timeout: datetime.timedelta) -> None:
    """From now on, the longest wait of this rank for the others in a collective."""
    if dist.is_initialized():
        dist.distributed_c10d._set_pg_timeout(timeout)


def told_by_main(value: T) -> T:
    """Rank 0's value, on every rank."""
    return gathered(value, second_group())[0]


def barrier() -> None:
    """Wait for all ranks."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.barrier()


def visible_gpus() -> int:
    """GPUs this process can use."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def prefer_cpu_quietly(env: MutableMapping[str, str]) -> None:
    """Without a GPU, tell DeepSpeed so, or it warns that it found none."""
    if visible_gpus() == 0:
        env.setdefault("DS_ACCELERATOR", "cpu")


def local_threads(env: Mapping[str, str] = os.environ) -> None:
    """One process per share of the cores: several with all threads each are many times slower."""
    if "OMP_NUM_THREADS" not in env:
        local = int(env.get("LOCAL_WORLD_SIZE", "1"))
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // local))
