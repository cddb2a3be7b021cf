"""A config and this machine's facts -> the `accelerate launch` command of every node. Nothing is started here."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from shardwise.config.launcher import OURS
from shardwise.config.load import Loaded
from shardwise.config.secrets import SECRET
from shardwise.errors import ConfigError
from shardwise.launch.nodes import World

ACCELERATE_CONFIG = Path(__file__).with_name("accelerate.yaml")
WORLD_SIZE = "SHARDWISE_WORLD_SIZE"
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
# Left over from another launcher, these would be read as this one's decisions.
FOREIGN = re.compile(r"(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)\Z|ROLE_NAME\Z|MASTER_(ADDR|PORT)\Z|"
                     r"(ACCELERATE|FSDP|MEGATRON_LM|PARALLELISM_CONFIG|TORCHELASTIC)_")


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeCommand:
    """What one machine runs."""

    node_rank: int
    host: str | None
    argv: tuple[str, ...]
    env: dict[str, str]
    """Variables added to the machine's own."""
    unset: tuple[str, ...]
    """Variables of this shell taken away."""


def commands(loaded: Loaded, where: World, port: int, recipe: str, overrides: Sequence[str],
             env: Mapping[str, str], cores: int) -> list[NodeCommand]:
    """One command per node; only `machine_rank` differs. Raises ConfigError for a name no variable can have."""
    added = _environment(loaded, where, env, cores)
    unset = tuple(sorted(name for name in env if FOREIGN.match(name)))
    return [NodeCommand(node_rank=rank, host=where.hosts[rank] if where.hosts else None, unset=unset,
                        argv=_argv(where, rank, port, recipe, overrides), env=added)
            for rank in range(where.nodes)]


def _argv(where: World, rank: int, port: int, recipe: str, overrides: Sequence[str]) -> tuple[str, ...]:
    words = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(ACCELERATE_CONFIG),
             "--num_processes", str(where.processes), "--num_machines", str(where.nodes),
             "--machine_rank", str(rank), "--main_process_port", str(port)]
    if where.nodes > 1:
        words += ["--main_process_ip", str(where.main_address), "--same_network"]
    if where.processes > 1:
        # Also without a GPU: it is what starts several processes, while --cpu and MULTI_CPU start one.
        words.append("--multi_gpu")
    else:
        words.append("--quiet")  # a failure is told by the rank, not by a traceback of the launcher
    return (*words, "--module", "shardwise.train", recipe, *overrides)


def _environment(loaded: Loaded, where: World, env: Mapping[str, str], cores: int) -> dict[str, str]:
    forwarded = {name: env[name] for name in dict.fromkeys(loaded.config.launch.forward_env) if name in env}
    bad = [name for name in loaded.config.launch.forward_env if not NAME.match(name)]
    if bad:
        raise ConfigError(f"{loaded.origins['launch.forward_env']}: launch.forward_env={','.join(bad)}: not the "
                          "name of an environment variable; list names only, their values are looked up")
    threads = env.get("OMP_NUM_THREADS") or str(max(1, cores // where.per_node))
    return forwarded | {"OMP_NUM_THREADS": threads, OURS: "1", WORLD_SIZE: str(where.processes)}


def available_cores() -> int:
    """CPU cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def printed(command: NodeCommand, *, nodes: int, folder: Path) -> str:
    """The command as a line for bash, with secrets hidden, after a heading that says where it runs."""
    host = f" ({command.host})" if command.host else ""
    hidden = [name for name in command.env if SECRET.search(name)]
    words = ["env", *(word for name in command.unset for word in ("-u", name)),
             *(f"{name}={'***' if name in hidden else quoted(value)}" for name, value in command.env.items()),
             *map(quoted, command.argv)]
    note = f"  # replace *** in {', '.join(hidden)} by the value; secrets are not printed\n" if hidden else ""
    return f"node {command.node_rank} of {nodes}{host}:\n{note}  cd {quoted(str(folder))} && {' '.join(words)}"


def quoted(text: str) -> str:
    """One bash word on one line, whatever is in it."""
    if not any(ord(char) < 32 or ord(char) == 127 for char in text):
        return shlex.quote(text)
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return "$'" + re.sub(r"[\x00-\x1f\x7f]", lambda found: f"\\x{ord(found[0]):02x}", escaped) + "'"
