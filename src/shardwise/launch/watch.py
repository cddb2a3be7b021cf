"""Follow the ranks of one machine while they run: pass signals on, notice who dies or stalls, end all of them."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from pathlib import Path
from types import FrameType

from shardwise import liveness, outcome
from shardwise.errors import EXIT_FAILURE
from shardwise.launch import processes
from shardwise.launch.nodes import World
from shardwise.launch.verdict import Verdict, verdict
from shardwise.liveness import Beat, Stall, Vigil
from shardwise.outcome import RankOutcome

POLL_SECONDS = 0.1
# How long the others may go on once a rank is lost: by then a clean exit has failed (a collective cannot end).
GRACE_SECONDS = 15.0
# One wish may come twice: from a terminal or batch system, and passed on by whatever started the launcher.
SAME_WISH_SECONDS = 0.5


class Watch:
    """Follows the ranks through their outcome files and beats while the child runs."""

    def __init__(self, folder: Path, child: subprocess.Popen[bytes], *, stall_seconds: float) -> None:
        self.folder, self.child = folder, child
        self.vigil, self.stall_seconds = Vigil(stall_seconds), stall_seconds
        self.beats: dict[int, Beat] = {}
        self.looked_at = 0.0
        self.stall: Stall | None = None
        self.gone: dict[int, float] = {}
        """Rank -> when it was first missed, for ranks that ended without a word."""
        self.ended: set[int] = set()
        """Ranks that lived when all were ended."""
        self.signals: list[tuple[int, float]] = []
        """Signals to this process and when they came, by the monotonic clock."""
        self.told: set[int] = set()
        self.killed = False
        self.deadline: float | None = None

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        """Remember a signal; the loop acts on it."""
        self.signals.append((number, time.monotonic()))

    def wait(self) -> int:
        """The child's exit code, after all of it."""
        while True:
            try:
                return self.child.wait(timeout=POLL_SECONDS)
            except subprocess.TimeoutExpired:
                self._look()

    def result(self, where: World, code: int) -> Verdict:
        """What the run came to, told as a stop where a stop was asked for and could not be honoured."""
        beats = liveness.read(self.folder) or self.beats
        found = verdict(self.folder, where.per_node, code, first_rank=where.first_rank, gone=self.gone,
                        beats=beats, ended=self.ended)
        if self.stall is not None and found.exit_code == EXIT_FAILURE:
            found = Verdict(EXIT_FAILURE, self.stall.message(self.stall_seconds), True)
        if not self.signals or found.exit_code != EXIT_FAILURE:
            return found
        name = signal.Signals(self.signals[0][0]).name
        how = "killed at the second signal" if self.killed else f"stopped by {name} before the run could save"
        return Verdict(EXIT_FAILURE, f"{found.message}\n{how}; complete checkpoints are untouched, start again to go "
                                     "on")

    def _look(self) -> None:
        ranks = [rank for rank in outcome.read(self.folder) if rank.host == socket.gethostname()]
        living = [rank for rank in ranks if rank.kind == "running"]
        lost = any(rank.kind in ("user", "failed") for rank in ranks)
        for rank in living:
            if not liveness.alive(rank.pid):
                # It may have written its last word and ended since the file was read.
                lost = self._missed(rank.rank) or lost
        self._listen(living)
        # Some left at a signal before there was anything to agree on; the others would wait for them for ever.
        left = any(rank.kind == "stopped" and rank.step is None for rank in ranks)
        self._pass_on(living, left or any(map(_alone_in_stopping, self.beats.values())))
        if (lost or left) and self.deadline is None:
            self.deadline = time.monotonic() + GRACE_SECONDS
        self.killed = self._second_signal()
        if self.killed or self.stall is not None or (self.deadline is not None and time.monotonic() > self.deadline):
            self.ended = {rank.rank for rank in living if liveness.alive(rank.pid)}
            processes.kill_tree(self.child.pid)

    def _listen(self, living: list[RankOutcome]) -> None:
        """Read the beats, about as often as they come."""
        now = time.monotonic()
        if now - self.looked_at < liveness.BEAT_SECONDS / 2:
            return
        self.looked_at = now
        pids = {rank.pid for rank in living}
        self.beats = liveness.read(self.folder)
        self.stall = self.vigil.look([beat for beat in self.beats.values() if beat.pid in pids], now)

    def _missed(self, number: int) -> bool:
        still = outcome.read_one(self.folder, number)
        missed = still is not None and still.kind == "running"
        if missed:
            self.gone.setdefault(number, time.time())
        return missed

    def _second_signal(self) -> bool:
        impatient = [at for number, at in self.signals if number in (signal.SIGINT, signal.SIGTERM)]
        return bool(impatient) and impatient[-1] - impatient[0] > SAME_WISH_SECONDS

    def _pass_on(self, living: list[RankOutcome], wished: bool) -> None:
        """A signal to this process, or the wish of one rank, to every rank that has no wish yet."""
        if not self.signals and not wished:
            return
        number = self.signals[0][0] if self.signals else signal.SIGTERM
        for rank in living:
            beat = self.beats.get(rank.rank)
            if rank.pid not in self.told and not (beat is not None and beat.stopping and not self.signals):
                self._tell(rank.pid, signal.SIGTERM if number == signal.SIGHUP else number)

    def _tell(self, pid: int, number: int) -> None:
        """Once to each rank, and to the ranks alone: their agent would kill them for it."""
        self.told.add(pid)
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            self.told.discard(pid)


def _alone_in_stopping(beat: Beat) -> bool:
    """Whether a rank wants to stop where ranks do not ask each other."""
    return beat.stopping and beat.phase not in liveness.AGREED
