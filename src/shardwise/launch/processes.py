"""Which processes live beneath this one (Linux; elsewhere only what the caller started itself is known)."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys

from shardwise.liveness import PROC, process_state

PR_SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> None:
    """Make this process the parent of every descendant whose own parent ends, so that none can be lost."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)


def descendants(root: int) -> list[int]:
    """All living processes beneath `root`, parents first."""
    children: dict[int, list[int]] = {}
    for entry in PROC.iterdir() if PROC.is_dir() else ():
        if entry.name.isdecimal():
            state, parent = process_state(int(entry.name))
            if state not in ("", "Z", "X"):
                children.setdefault(parent, []).append(int(entry.name))
    found, open_ends = [], [root]
    while open_ends:
        beneath = children.get(open_ends.pop(0), [])
        found.extend(beneath)
        open_ends.extend(beneath)
    return found


def kill_tree(child: int) -> None:
    """SIGKILL `child`, its process group and everything this process is the ancestor of, then collect them."""
    while beneath := descendants(os.getpid()):
        for pid in reversed(beneath):  # children first: a rank whose agent died would take it for a signal
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        _collect()
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child, signal.SIGKILL)
    _collect()


def _collect() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG) != (0, 0):
            pass
