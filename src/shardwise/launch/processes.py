"""Which processes live beneath this one (Linux; elsewhere only what the caller started itself is known)."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from pathlib import Path

PR_SET_CHILD_SUBREAPER = 36
PROC = Path("/proc")


def adopt_orphans() -> None:
    """Make this process the parent of every descendant whose own parent ends, so that none can be lost."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)


def alive(pid: int) -> bool:
    """Whether a process still runs; one that ended but was not waited for does not."""
    if sys.platform == "linux":
        state, _ = _stat(pid)
        return state not in ("", "Z", "X")
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def descendants(root: int) -> list[int]:
    """All living processes beneath `root`, parents first."""
    children: dict[int, list[int]] = {}
    for entry in PROC.iterdir() if PROC.is_dir() else ():
        if entry.name.isdecimal():
            state, parent = _stat(int(entry.name))
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
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child, signal.SIGKILL)
    while beneath := descendants(os.getpid()):
        for pid in beneath:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        _collect()
    _collect()


def _collect() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG) != (0, 0):
            pass


def _stat(pid: int) -> tuple[str, int]:
    """State letter and parent of a process; ("", 0) when there is none."""
    try:
        # The name may hold spaces and brackets; what follows the last bracket does not.
        text = (PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
        fields = text.rpartition(")")[2].split()
        return fields[0], int(fields[1])
    except (OSError, IndexError, ValueError):
        return "", 0
