"""Faults for tests, put in front of the product through PYTHONPATH; the product knows nothing of them.

`FAULT=KIND@RANK:STEP` strikes one rank before its optimizer step of that index, counted from 0 in each process:
raise, oom (out of memory), exit (with 0), kill (SIGKILL to itself), freeze (SIGSTOP to itself), hang, sleepN (N
seconds, then on) or slowN (N seconds at this and every later call). RANK may be `*`. With `FAULT_ONCE=FILE` only
while there is no such file; with `FAULT_AT=MODULE:FUNCTION` before that function instead, and with `FAULT_SAYS=FILE`
that file is made first.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import os
import signal
import sys
import time

MODULE, _, NAME = os.environ.get("FAULT_AT", "shardwise.train.step:optimizer_step").partition(":")


def strike(kind):
    once = os.environ.get("FAULT_ONCE")
    if once:
        try:
            os.close(os.open(once, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return
    if os.environ.get("FAULT_SAYS"):
        os.close(os.open(os.environ["FAULT_SAYS"], os.O_CREAT))
    if kind == "raise":
        raise RuntimeError("struck by the test")
    if kind == "oom":
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes")
    if kind == "exit":
        os._exit(0)
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "freeze":
        os.kill(os.getpid(), signal.SIGSTOP)
    if kind == "hang":
        time.sleep(600)
    if kind.startswith(("sleep", "slow")):
        time.sleep(float(kind.lstrip("slepow")))


def wrapped(inner, kind, at):
    calls = 0

    def outer(*args, **kwargs):
        nonlocal calls
        if calls == at or (calls > at and kind.startswith("slow")):
            strike(kind)
        calls += 1
        return inner(*args, **kwargs)

    return outer


class Finder(importlib.abc.MetaPathFinder):
    """Lets the one module be found as usual, then replaces its function."""

    def __init__(self, kind, at):
        self.kind, self.at = kind, at

    def find_spec(self, name, path=None, target=None):
        if name != MODULE:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            setattr(module, NAME, wrapped(getattr(module, NAME), self.kind, self.at))

        spec.loader.exec_module = exec_module
        return spec


kind, _, rest = os.environ.get("FAULT", "").partition("@")
rank, _, step = rest.partition(":")
if kind and rank in ("*", os.environ.get("RANK", "0")):
    sys.meta_path.insert(0, Finder(kind, int(step or 0)))
