"""How many processes on how many machines, and where they meet."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from shardwise.config.load import Loaded
from shardwise.config.schema import LaunchConfig
from shardwise.errors import ConfigError, PreflightError
from shardwise.launch import ports

HOST = re.compile(r"(\S+)\s+slots=(\d+)\s*\Z")


@dataclass(frozen=True, kw_only=True, slots=True)
class World:
    """The split of a run's processes over machines."""

    processes: int
    nodes: int
    node_rank: int
    main_address: str | None
    hosts: tuple[str, ...]
    """Host names from the hostfile, in order of node rank; empty without one."""

    @property
    def per_node(self) -> int:
        """Processes on each machine."""
        return self.processes // self.nodes

    @property
    def first_rank(self) -> int:
        """Rank of this machine's first process."""
        return self.node_rank * self.per_node


def world(loaded: Loaded, gpus: int) -> World:
    """The processes a config asks for on machines with `gpus` visible GPUs each.

    Raises PreflightError when a machine has fewer GPUs than processes, ConfigError when the hostfile disagrees.
    """
    launch = loaded.config.launch
    each = gpus or launch.cpu_processes
    processes = each * launch.nodes if launch.processes == "auto" else launch.processes
    per_node = processes // launch.nodes
    if 0 < gpus < per_node:
        have = f"{gpus} GPUs are" if gpus > 1 else "1 GPU is"
        raise PreflightError(
            f"{loaded.origins['launch.processes']}: launch.processes={processes} means {per_node} per node, but "
            f"{have} visible; use at most {gpus * launch.nodes}, or make more visible (CUDA_VISIBLE_DEVICES)")
    hosts = _hosts(launch, per_node, loaded.origins["launch.hostfile"])
    return World(processes=processes, nodes=launch.nodes, node_rank=launch.node_rank, hosts=hosts,
                 main_address=launch.main_address or (hosts[0] if hosts else None))


def _hosts(launch: LaunchConfig, per_node: int, origin: str) -> tuple[str, ...]:
    if launch.hostfile is None:
        return ()
    path = Path(launch.hostfile)
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{origin}: launch.hostfile={path} cannot be read: {error}") from None
    faults: list[str] = []
    hosts = []
    for number, line in enumerate(lines, start=1):
        text = line.partition("#")[0].strip()
        found = HOST.match(text)
        if text and not found:
            faults.append(f"{path}:{number}: {text!r} is not `HOST slots=N`")
        elif found:
            hosts.append(found[1])
            if int(found[2]) != per_node:
                faults.append(f"{path}:{number}: {found[1]} has slots={found[2]}, but launch.processes and "
                              f"launch.nodes mean {per_node} processes per node; make them agree")
    if not faults and len(hosts) != launch.nodes:
        faults.append(f"{path}: {len(hosts)} hosts, but launch.nodes={launch.nodes}; make them agree")
    if faults:
        raise ConfigError(faults)
    return tuple(hosts)


def meeting_port(loaded: Loaded, where: World, free_port: Callable[[], int] = ports.free_port,
                 is_free: Callable[[int], bool] = ports.is_free) -> int:
    """The port of the rendezvous. Raises ConfigError when this machine is to open it and it is taken."""
    asked = loaded.config.launch.main_port
    if asked is None and where.nodes == 1:
        return free_port()
    port = asked or ports.SEVERAL_NODES_DEFAULT
    if where.node_rank == 0 and not is_free(port):
        way_out = "leave it out for a free one" if where.nodes == 1 else "set another one, the same on every node"
        raise ConfigError(f"{loaded.origins['launch.main_port']}: launch.main_port={port} is in use on this "
                          f"machine; {way_out}")
    return port
