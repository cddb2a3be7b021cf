"""Start one node's command, pass signals on, end everything together and say what came of it."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from shardwise import outcome
from shardwise.errors import EXIT_FAILURE, LaunchError
from shardwise.launch import processes
from shardwise.launch.command import NodeCommand
from shardwise.launch.nodes import World
from shardwise.outcome import Verdict

POLL_SECONDS = 0.1
# How long the others may go on once a rank is lost: by then a clean exit has failed (a collective cannot end).
GRACE_SECONDS = 15.0
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)


def run(command: NodeCommand, where: World, env: Mapping[str, str]) -> Verdict:
    """Run to the end; nothing this started is left behind. Raises LaunchError if it cannot be started."""
    folder = Path(tempfile.mkdtemp(prefix="shardwise-"))
    own = {name: value for name, value in env.items() if name not in command.unset}
    processes.adopt_orphans()
    try:
        child = subprocess.Popen(command.argv, env=own | command.env | {outcome.ENV: str(folder)},
                                 process_group=0, preexec_fn=_in_child)
        try:
            watch = Watch(folder, child)
            with _handled(watch.on_signal):
                code = watch.wait()
        finally:
            processes.kill_tree(child.pid)
        return watch.explain(outcome.verdict(folder, where.per_node, code, first_rank=where.first_rank,
                                             gone=watch.gone))
    except OSError as error:
        raise LaunchError(f"cannot start {command.argv[0]}: {error}") from None
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class Watch:
    """Follows the ranks through their outcome files while the child runs."""

    def __init__(self, folder: Path, child: subprocess.Popen[bytes]) -> None:
        self.folder, self.child = folder, child
        self.gone: dict[int, float] = {}
        """Rank -> when it was first missed, for ranks that ended without a word."""
        self.signals: list[int] = []
        self.told: set[int] = set()
        self.killed = False
        self.deadline: float | None = None

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        """Remember a signal; the loop acts on it."""
        self.signals.append(number)

    def wait(self) -> int:
        """The child's exit code, after all of it."""
        while True:
            try:
                return self.child.wait(timeout=POLL_SECONDS)
            except subprocess.TimeoutExpired:
                self._look()

    def explain(self, verdict: Verdict) -> Verdict:
        """The verdict, told as a stop where a stop was asked for and could not be honoured."""
        if not self.signals or verdict.exit_code != EXIT_FAILURE:
            return verdict
        name = signal.Signals(self.signals[0]).name
        how = "killed at the second signal" if self.killed else f"stopped by {name} before the run could save"
        return Verdict(EXIT_FAILURE, f"{how}; complete checkpoints are untouched, start again to go on "
                                     f"({verdict.message})")

    def _look(self) -> None:
        ranks = [rank for rank in outcome.read(self.folder) if rank.host == socket.gethostname()]
        lost = any(rank.kind in ("user", "failed") for rank in ranks)
        for rank in ranks:
            if rank.kind == "running" and not processes.alive(rank.pid):
                # It may have written its last word and ended since the file was read.
                lost = self._missed(rank.rank) or lost
            elif rank.kind == "running" and self.signals and rank.pid not in self.told:
                self._tell(rank.pid)
        if lost and self.deadline is None:
            self.deadline = time.monotonic() + GRACE_SECONDS
        impatient = [number for number in self.signals if number in (signal.SIGINT, signal.SIGTERM)]
        if len(impatient) > 1 or (self.deadline is not None and time.monotonic() > self.deadline):
            self.killed = True
            processes.kill_tree(self.child.pid)

    def _missed(self, number: int) -> bool:
        still = [rank for rank in outcome.read(self.folder) if rank.rank == number and rank.kind == "running"]
        if still:
            self.gone.setdefault(number, time.time())
        return bool(still)

    def _tell(self, pid: int) -> None:
        """The first signal, once to each rank, and to the ranks alone: their agent would kill them for it."""
        number = signal.SIGTERM if self.signals[0] == signal.SIGHUP else self.signals[0]
        self.told.add(pid)
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            self.told.discard(pid)


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
