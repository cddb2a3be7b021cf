"""One live run per folder: `RUN/.lock`, held by rank 0 for as long as it lives.

The lock is the kernel's and ends with its holder, however that ends. The file says who holds it, and is touched every
few seconds, for the sake of another host to which the kernel's lock may mean nothing (some shared file systems).
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import socket
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from shardwise.errors import PreflightError
from shardwise.liveness import alive

NAME = ".lock"
JOB = "SHARDWISE_JOB"
PATIENCE_SECONDS = 2.0
"""A look at the lock holds it for a moment, and a holder that was just killed takes one to end."""
TOUCH_SECONDS = 5.0
STALE_SECONDS = 120.0
"""A holder on another host that has not touched the file for so long is gone."""

log = logging.getLogger("shardwise")
_held: RunLock | None = None


def job_of(env: Mapping[str, str], meeting_at: str = "") -> str:
    """What the ranks of one job have in common, and a queued-again job with its first try; else never the same."""
    if JOB in env:
        return env[JOB]
    if "SLURM_JOB_ID" in env:
        return f"slurm {env['SLURM_JOB_ID']}.{env.get('SLURM_STEP_ID', '')}"
    run = env.get("TORCHELASTIC_RUN_ID", "none")
    if run != "none":
        return f"torchrun {run}"
    if "MASTER_PORT" in env:
        meeting_at = f"{env.get('MASTER_ADDR')}:{env['MASTER_PORT']}"
    return f"at {meeting_at}" if meeting_at else uuid.uuid4().hex


@contextlib.contextmanager
def held(folder: Path, *, main: bool, job: str) -> Iterator[None]:
    """Hold the run folder (`main`, rank 0), or make sure that no other job does.

    Raises PreflightError naming host and pid of the live run that holds it.
    """
    global _held
    if not main:
        refuse_if_held(folder, job)
        yield
        return
    with _writable(folder):
        _held = RunLock(folder, job)
    try:
        yield
    finally:
        _held.release()
        _held = None


def touch() -> None:
    """Say that the holder lives; does nothing in a process that holds no run folder."""
    if _held is not None:
        _held.touch()


def refuse_if_held(folder: Path, job: str) -> None:
    """Raises PreflightError when a live run of another job holds the folder; leaves everything as it is."""
    path = folder / NAME
    with _writable(folder), contextlib.suppress(FileNotFoundError):
        handle = os.open(path, os.O_RDWR)
        try:
            _refuse_live(path, handle, job, own_is_fine=True)
        finally:
            os.close(handle)


class RunLock:
    """The lock on one run folder. Raises PreflightError when a live run holds it."""

    def __init__(self, folder: Path, job: str) -> None:
        self.path, self.touched_at = folder / NAME, time.monotonic()
        self.made_folder = not folder.exists()
        while True:
            folder.mkdir(parents=True, exist_ok=True)
            self.handle = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
            try:
                _refuse_live(self.path, self.handle, job, own_is_fine=False)
            except BaseException:
                os.close(self.handle)
                raise
            if self._is_the_file():
                break
            os.close(self.handle)  # its last holder removed it in between
        who = {"host": socket.gethostname(), "pid": os.getpid(), "job": job,
               "since": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}
        os.ftruncate(self.handle, 0)
        os.pwrite(self.handle, json.dumps(who).encode(), 0)
        os.fsync(self.handle)

    def _is_the_file(self) -> bool:
        try:
            return os.path.samestat(os.fstat(self.handle), os.stat(self.path))
        except FileNotFoundError:
            return False

    def touch(self) -> None:
        """Say that the holder lives, every few seconds however often it is called."""
        now = time.monotonic()
        if now - self.touched_at > TOUCH_SECONDS:
            self.touched_at = now
            with contextlib.suppress(OSError):
                os.utime(self.handle)

    def release(self) -> None:
        """Let the folder go; one that was made for nothing goes too."""
        with contextlib.suppress(OSError):
            if self._is_the_file():
                self.path.unlink()
            if self.made_folder:
                self.path.parent.rmdir()
        os.close(self.handle)


@contextlib.contextmanager
def _writable(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise PreflightError(f"{folder}: the run folder cannot be written to ({error.strerror or error}); choose "
                             "another run.output_dir") from None


def _refuse_live(path: Path, handle: int, job: str, *, own_is_fine: bool) -> None:
    """Take the kernel's lock, or refuse; where there is no such lock, go by what the file says."""
    until = time.monotonic() + PATIENCE_SECONDS
    while (locked := _lock(handle)) is False:
        if own_is_fine and _said(handle).get("job") == job:
            return
        if time.monotonic() > until:
            raise _refusal(path, _said(handle))
        time.sleep(0.05)
    who = _said(handle)
    if not who or who.get("job") == job:
        return
    if who.get("host") == socket.gethostname():
        lives = locked is None and alive(int(who.get("pid", 0)))
    else:
        lives = _seen_to_live(path, who)
    if lives:
        raise _refusal(path, who)


def _lock(handle: int) -> bool | None:
    """True when taken, False when another process has it, None where the file system knows no locks."""
    try:
        # By process, not by open file: a forked child that outlives its parent does not keep it.
        fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    except OSError:
        return None
    return True


def _said(handle: int) -> dict[str, Any]:
    try:
        return dict(json.loads(os.pread(handle, 10_000, 0)))
    except (OSError, ValueError, TypeError):
        return {}


def _seen_to_live(path: Path, who: dict[str, Any]) -> bool:
    """Whether a holder on another host touches the file; known within seconds for a live one."""
    first = path.stat().st_mtime
    with tempfile.TemporaryFile(dir=path.parent) as file:
        age = os.fstat(file.fileno()).st_mtime - first  # both by the file system's clock
    if age < STALE_SECONDS:
        log.warning("%s: %s (pid %s) held it %.0f s ago; seeing whether it still does", path.parent, who.get("host"),
                    who.get("pid"), max(0.0, age))
    until = time.monotonic() + STALE_SECONDS - age
    while time.monotonic() < until:
        time.sleep(0.5)
        if path.stat().st_mtime != first:
            return True
    return False


def _refusal(path: Path, who: dict[str, Any]) -> PreflightError:
    host, pid, since = (who.get(key, "unknown") for key in ("host", "pid", "since"))
    return PreflightError(f"{path.parent}: a live run holds this folder: host {host}, pid {pid}, since {since}; wait "
                          "for it, stop it, or choose another run.output_dir")
