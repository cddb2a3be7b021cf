"""One live run per folder: the second start is refused, and what is left of a dead one is not in the way."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from pathlib import Path

from launched import TINY, finish, launch, mentioning, metrics, start, wait_for
from shardwise.launch.ports import free_port

LONG = ["schedule.max_steps=2000", "launch.processes=2"]


def test_a_second_start_is_refused_and_the_first_goes_on(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    process = start("./launch.sh", *TINY, *LONG, f"run.output_dir={folder}")
    wait_for(lambda: len(metrics(folder)) >= 2, 90, "two steps")
    began = time.monotonic()
    code, output = launch(*LONG, f"run.output_dir={folder}")
    assert code == 2 and time.monotonic() - began < 20, output[-2000:]
    last = output.strip().splitlines()[-1]
    assert "a live run holds this folder" in last and f"host {socket.gethostname()}, pid " in last
    pid = int(last.partition("pid ")[2].partition(",")[0])
    assert b"shardwise.train" in Path(f"/proc/{pid}/cmdline").read_bytes()
    # Without our launcher too: both ranks end by themselves, before there is a group to wait in.
    torchrun = start(sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port",
                     str(free_port()), "-m", "shardwise.train", *TINY, *LONG, f"run.output_dir={folder}")
    code, output = finish(torchrun, 60)
    assert code == 1 and f"pid {pid}" in output and "exitcode  : 2" in output, output[-2000:]
    steps = len(metrics(folder))
    wait_for(lambda: len(metrics(folder)) > steps, 30, "one more step of the first run")
    process.send_signal(signal.SIGTERM)
    assert finish(process, 60)[0] == 3
    assert not (folder / ".lock").exists()


def test_what_a_killed_run_leaves_is_not_in_the_way(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    words = ["schedule.max_steps=6", "checkpoint.every_steps=2", f"run.output_dir={folder}"]
    process = start("./launch.sh", *TINY, *words, FAULT="hang@0:4")
    wait_for((folder / "checkpoints" / "step-00000004").is_dir, 90, "four steps")
    for pid in mentioning(str(folder)):
        os.kill(pid, signal.SIGKILL)
    finish(process, 30)
    assert (folder / ".lock").is_file()
    code, output = launch(*words)
    assert code == 0 and "going on after step 4" in output, output[-2000:]
