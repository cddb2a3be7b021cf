"""Real ranks for tests: subprocesses over gloo, killed together at a hard time-out, read back as files.

`spawn("dist.bodies:train_all", world_size=2, ...)` runs a function in every rank. Starting a rank takes
seconds, so ranks stay up for the next call, a body runs many configurations one after another, and each calls
`teardown()` when it is done. A world of one is a subprocess too: nothing a rank does to its process reaches
pytest. After a failure the ranks are killed and the next call starts others.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import gc
import importlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[1]
REPOSITORY = TESTS.parent
TAIL_BYTES = 6000
"""Of a failing rank's output."""
START_SECONDS = 60.0
"""Allowed on top of a call's time-out when its ranks have to be started."""


def spawn(body: str, *, world_size: int, args: dict[str, Any], folder: Path, timeout_s: float) -> list[Any]:
    """What `body` ("module:function", called with `args` and the folder for its files) returned on each rank.

    Raises AssertionError with the output of the ranks that failed, or were not done in time.
    """
    folder.mkdir(parents=True, exist_ok=True)
    fresh = world_size not in _worlds
    if fresh:
        _worlds[world_size] = _World(world_size)
    try:
        return _worlds[world_size].run(body, args, folder, timeout_s + START_SECONDS * fresh)
    except BaseException:
        _worlds.pop(world_size).end()
        raise


class _World:
    """The ranks of one world size, waiting for bodies to run."""

    def __init__(self, size: int) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="ranks-"))
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.ranks = [self._start(rank, size, port) for rank in range(size)]

    def _start(self, rank: int, size: int, port: int) -> subprocess.Popen[bytes]:
        foreign = ("ACCELERATE_", "SHARDWISE_", "TORCHELASTIC_", "FSDP_")
        kept = {key: value for key, value in os.environ.items() if not key.startswith(foreign)}
        paths = [str(TESTS), str(REPOSITORY / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
        env = kept | {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size),
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "PYTHONPATH": os.pathsep.join(paths),
            "SHARDWISE_CACHE": str(self.folder / "cache"), "OMP_NUM_THREADS": "1",
            # On the CPU even where there is a GPU, and never through the network.
            "CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu", "HF_HUB_OFFLINE": "1", "WANDB_MODE": "offline",
            "TOKENIZERS_PARALLELISM": "false", "TRANSFORMERS_VERBOSITY": "error",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1", "PYTHONWARNINGS": "ignore", "TQDM_MININTERVAL": "3600",
        }
        with open(self.folder / f"rank-{rank}.log", "wb") as log:
            return subprocess.Popen([sys.executable, "-m", "dist.harness"], env=env, cwd=REPOSITORY,
                                    stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT,
                                    start_new_session=True)

    def run(self, body: str, args: dict[str, Any], folder: Path, timeout_s: float) -> list[Any]:
        results = [folder / f"rank-{number}.json" for number in range(len(self.ranks))]
        job = json.dumps({"body": body, "args": args, "folder": str(folder), "timeout_s": timeout_s})
        for rank, result in zip(self.ranks, results, strict=True):
            result.unlink(missing_ok=True)
            assert rank.stdin is not None
            rank.stdin.write(job.encode() + b"\n")
            rank.stdin.flush()
        deadline = time.monotonic() + timeout_s
        while not all(result.is_file() for result in results):
            if any(rank.poll() is not None for rank in self.ranks):
                time.sleep(0.5)  # the others follow, with errors of their own
                raise AssertionError("\n".join(self._story(number, f"{body} ended it with exit code {rank.poll()}")
                                               for number, rank in enumerate(self.ranks) if rank.poll() is not None))
            if time.monotonic() > deadline:
                raise AssertionError("\n".join(self._story(number, f"{body} is not done after {timeout_s:.0f} s")
                                               for number, result in enumerate(results) if not result.is_file()))
            time.sleep(0.02)
        return [json.loads(result.read_text()) for result in results]

    def _story(self, rank: int, what: str) -> str:
        output = (self.folder / f"rank-{rank}.log").read_bytes()[-TAIL_BYTES:].decode(errors="replace")
        return f"rank {rank}: {what}. Its output ends with\n{output}"

    def end(self) -> None:
        for rank in self.ranks:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(rank.pid, signal.SIGKILL)
            rank.wait()
            with contextlib.suppress(BrokenPipeError):
                rank.stdin.close()  # type: ignore[union-attr]
        shutil.rmtree(self.folder, ignore_errors=True)


_worlds: dict[int, _World] = {}


@atexit.register
def _end_all() -> None:
    while _worlds:
        _worlds.popitem()[1].end()


def teardown(engine: Any = None) -> None:
    """Make the process as it was before an Accelerator was made; the process group stays for the next one."""
    from accelerate.state import AcceleratorState, GradientState
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    if hasattr(engine, "destroy"):
        engine.destroy()
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    unset_hf_deepspeed_config()
    for name in [key for key in os.environ if key.startswith("ACCELERATE_")]:
        del os.environ[name]
    gc.collect()
    gc.freeze()  # what is left are modules; looking through them again would take longer than a training step


def main() -> None:
    """One rank: run every job that comes in, end with the parent or at the first failure."""
    for line in sys.stdin:
        job = json.loads(line)
        # Says where a hanging rank hangs, just before the parent ends it.
        faulthandler.dump_traceback_later(max(0.5, job["timeout_s"] - 1), exit=False)
        module, _, name = job["body"].partition(":")
        folder = Path(job["folder"])
        result = getattr(importlib.import_module(module), name)(job["args"], folder)
        faulthandler.cancel_dump_traceback_later()
        beside = folder / f"rank-{os.environ['RANK']}.part"
        beside.write_text(json.dumps(result))
        beside.replace(beside.with_suffix(".json"))


if __name__ == "__main__":
    main()
