"""Rank bodies that fail, for test_harness.py."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any


def answer(args: dict[str, Any], folder: Path) -> dict[str, Any]:
    """What this rank was told."""
    return {"rank": int(os.environ["RANK"]), "of": int(os.environ["WORLD_SIZE"]), "pid": os.getpid(), **args}


def fail_on_one(args: dict[str, Any], folder: Path) -> None:
    """One rank raises while the others wait for it."""
    if int(os.environ["RANK"]) == args["rank"]:
        raise RuntimeError("this rank was told to fail")
    time.sleep(60)


def hang(args: dict[str, Any], folder: Path) -> None:
    """For ever, as a collective does that one rank never enters."""
    time.sleep(3600)
