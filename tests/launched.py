"""Start the product from the outside, as a user does, and look at what it leaves."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FAULTS = Path(__file__).with_name("faults")
TINY = ["recipes/tiny.yaml", "data.eval=[]", "batch.examples_per_step=4"]
DROPPED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "CUDA_VISIBLE_DEVICES", "FAULT",
           "WANDB_API_KEY", "WANDB_SWEEP_ID", "WANDB_RUN_ID")


def environment(**more: str) -> dict[str, str]:
    """This process's, with the running interpreter first on PATH and without what a launcher may have set."""
    env = {name: value for name, value in os.environ.items() if name not in DROPPED}
    env["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{env['PATH']}"
    env["PYTHONPATH"] = os.pathsep.join(
        [str(FAULTS), str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
    return env | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""} | more


_started: list[subprocess.Popen[str]] = []


def start(*words: str, **env: str) -> subprocess.Popen[str]:
    """A command in the checkout, its two outputs in one pipe."""
    process = subprocess.Popen(words, cwd=ROOT, env=environment(**env), text=True, stdin=subprocess.DEVNULL,
                               stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    _started.append(process)
    return process


def end_all() -> None:
    """End what a failed test left running; ranks go with their launcher."""
    while _started:
        _end(_started.pop())


def _end(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        process.terminate()  # a launcher and an agent end their ranks before themselves
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=40)
        process.kill()
    process.wait()
    if process.stdout is not None:
        process.stdout.close()


def finish(process: subprocess.Popen[str], timeout: float = 120) -> tuple[int, str]:
    """Exit code and output; a process that takes longer is killed and fails the test."""
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired as late:
        so_far = (late.stdout or b"").decode(errors="replace")
        _end(process)
        raise AssertionError(f"not done after {timeout} s:\n{so_far[-3000:]}") from None
    return process.returncode, output


def launch(*words: str, timeout: float = 120, **env: str) -> tuple[int, str]:
    """`./launch.sh` with the tiny recipe and these settings."""
    return finish(start("./launch.sh", *TINY, *words, **env), timeout)


def metrics(folder: Path) -> list[dict[str, Any]]:
    """The training lines of a run."""
    path = folder / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [line for line in lines if "loss" in line]


def mentioning(text: str) -> list[int]:
    """Living processes with `text` in their command line, but this one and its ancestors' shells."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and int(entry.name) != os.getpid():
            try:
                words = (entry / "cmdline").read_bytes().decode(errors="replace")
                state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
            except OSError:
                continue
            if text in words and state not in "ZX":
                found.append(int(entry.name))
    return found


def wait_for(condition: Callable[[], object], seconds: float, what: str) -> None:
    """Poll until true. Raises AssertionError after `seconds`."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"{what}: not within {seconds} s"
        time.sleep(0.1)
