"""Start one node's command, again where that may help, end everything together and say what came of it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from shardwise import lock, outcome
from shardwise.config.schema import Config
from shardwise.errors import EXIT_FAILURE, LaunchError, OutOfMemory
from shardwise.launch import processes
from shardwise.launch.command import NodeCommand
from shardwise.launch.nodes import World
from shardwise.launch.verdict import Verdict
from shardwise.launch.watch import Watch

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)


@dataclass(frozen=True, kw_only=True, slots=True)
class Care:
    """How a run is looked after."""

    folder: Path
    """The run folder."""
    job: str
    """See lock.job_of."""
    stall_seconds: float
    restarts: int


def care_for(config: Config, env: Mapping[str, str], meeting: str = "") -> Care:
    """As the settings say; `meeting` is where several nodes meet."""
    return Care(folder=Path(config.run.output_dir or ""), job=lock.job_of(env, meeting),
                stall_seconds=config.launch.stall_minutes * 60, restarts=config.launch.restarts)


def run(command: NodeCommand, where: World, env: Mapping[str, str], care: Care) -> Verdict:
    """Run to the end, starting again after a death or a stall up to `care.restarts` times.

    Nothing this started is left behind. Raises LaunchError if it cannot be started, PreflightError when another live
    run holds the run folder.
    """
    left, size = care.restarts, _micro_batch(care.folder)
    while True:
        lock.refuse_if_held(care.folder, care.job)
        result, signalled = _once(command, where, env, care)
        if result.exit_code != EXIT_FAILURE or signalled:
            return result
        smaller = _micro_batch(care.folder)
        if OutOfMemory.opening in result.message and smaller is not None and (size is None or smaller < size):
            why = f"with micro-batches of at most {smaller:,} tokens"
        elif result.mendable and left > 0:
            left -= 1
            why = f"restart {care.restarts - left} of {care.restarts}"
        else:
            return result
        size = smaller
        print(f"\n{result.message}\nstarting again from the newest complete checkpoint ({why})", file=sys.stderr,
              flush=True)


def _once(command: NodeCommand, where: World, env: Mapping[str, str], care: Care) -> tuple[Verdict, bool]:
    """One start: what it came to, and whether it was asked to stop."""
    folder = Path(tempfile.mkdtemp(prefix="shardwise-"))
    own = {name: value for name, value in env.items() if name not in command.unset}
    more = {outcome.ENV: str(folder), outcome.LAUNCHER: str(os.getpid()), lock.JOB: care.job}
    processes.adopt_orphans()
    try:
        child = subprocess.Popen(command.argv, env=own | command.env | more, process_group=0, preexec_fn=_in_child)
        try:
            watch = Watch(folder, child, stall_seconds=care.stall_seconds)
            with _handled(watch.on_signal):
                code = watch.wait()
        finally:
            processes.kill_tree(child.pid)
        return watch.result(where, code), bool(watch.signals)
    except OSError as error:
        raise LaunchError(f"cannot start {command.argv[0]}: {error}") from None
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _micro_batch(folder: Path) -> int | None:
    """The size the ranks fell back to when memory ran out; None when they did not."""
    try:
        return int(json.loads((folder / outcome.MICRO_BATCH).read_text(encoding="utf-8"))["max_tokens_per_micro_batch"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _in_child() -> None:
    outcome.stop_when_parent_dies(signal.SIGTERM)
    # A batch system signals every process of a step; between the agent and a rank only the rank has an answer.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)


@contextmanager
def _handled(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    before = {number: signal.signal(number, handler) for number in SIGNALS}
    try:
        yield
    finally:
        for number, was in before.items():
            signal.signal(number, was)
