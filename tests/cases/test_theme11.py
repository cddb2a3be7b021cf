"""Launching: cases B68, B73 and B75 with real processes. The others are unit tests of launch/ and config/."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from launched import TINY, finish, launch, mentioning, metrics, start, wait_for
from shardwise.launch.ports import free_port

STEPS = ["schedule.max_steps=6", "launch.processes=2"]


def test_b68_two_cpu_processes_are_two(tmp_path: Path) -> None:
    code, output = launch("schedule.max_steps=1", "launch.processes=2", f"run.output_dir={tmp_path / 'run'}")
    assert code == 0, output[-2000:]
    assert "2 ranks" in output


def test_b68_a_launcher_that_starts_one_is_found_out(tmp_path: Path) -> None:
    """`--cpu` with two processes starts one, without rank variables."""
    process = start(sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", "2",
                    "-m", "shardwise.train", *TINY, "schedule.max_steps=1", "launch.processes=2",
                    f"run.output_dir={tmp_path / 'run'}")
    code, output = finish(process)
    assert code != 0 and "2 processes were asked for, but the launcher started 1" in output
    assert metrics(tmp_path / "run") == []


@pytest.mark.parametrize(("kind", "words"), [
    ("raise", "RuntimeError: struck by the test"), ("exit", "without a word"), ("kill", "SIGKILL")])
def test_b75_first_cause_last_and_no_process_left(tmp_path: Path, kind: str, words: str) -> None:
    folder = tmp_path / "run"
    process = start("./launch.sh", *TINY, *STEPS, f"run.output_dir={folder}", FAULT=f"{kind}@1:2")
    wait_for(lambda: len(metrics(folder)) >= 2, 90, "two steps")
    struck = time.monotonic()
    code, output = finish(process, 60)
    assert time.monotonic() - struck < 60
    last = output.strip().splitlines()[-1]
    assert code == 1 and last.startswith("rank 1 (") and words in last, last
    assert mentioning(str(folder)) == []


def test_b75_a_rank_lost_without_its_peers_noticing(tmp_path: Path) -> None:
    """Rank 1 leaves with 0 while rank 0 hangs elsewhere: no connection breaks, the launcher must see it."""
    folder = tmp_path / "run"
    process = start("./launch.sh", *TINY, *STEPS, f"run.output_dir={folder}", FAULT="hang@0:2")
    wait_for(lambda: len(metrics(folder)) >= 2, 90, "two steps")
    [rank_1] = [pid for pid in mentioning(str(folder))
                if b"RANK=1" in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")]
    os.kill(rank_1, signal.SIGKILL)
    code, output = finish(process, 60)
    assert code == 1 and output.strip().splitlines()[-1].startswith("rank 1 (")
    assert mentioning(str(folder)) == []


def agent(number: int, port: int, folder: Path, **env: str) -> subprocess.Popen[str]:
    """One torchrun agent. Each round gets a store of its own: torch 2.13's shared one outlives the round, and ranks
    of the next round may find the last one's addresses in it.
    """
    return start(sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc_per_node", "1",
                 "--rdzv_backend", "c10d", "--rdzv_endpoint", f"127.0.0.1:{port}", "--rdzv_id", "b73",
                 "--max_restarts", "1", "-m", "shardwise.train", *TINY,
                 "schedule.max_steps=6", "launch.nodes=2",
                 "launch.main_address=127.0.0.1", f"launch.node_rank={number}", "checkpoint.every_steps=2",
                 f"run.output_dir={folder}", TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1", **env)


def test_b73_elastic_ranks_and_one_restart(tmp_path: Path) -> None:
    """Node 0 comes last, so it may get any rank: RANK alone decides who writes. Rank 1 is killed once."""
    folder, port = tmp_path / "run", free_port()
    fault = {"FAULT": "kill@1:3", "FAULT_ONCE": str(tmp_path / "struck")}
    second = agent(1, port, folder, **fault)
    time.sleep(1)
    first = agent(0, port, folder, **fault)
    ends = [finish(process, 150) for process in (first, second)]
    assert [code for code, _ in ends] == [0, 0], "\n".join(output[-1500:] for _, output in ends)
    steps = [line["step"] for line in metrics(folder)]
    assert steps[-4:] == [3, 4, 5, 6] and sorted(set(steps)) == [1, 2, 3, 4, 5, 6]
    # One of the two wrote everything: the other's output has no progress and no summary.
    assert sum("examples/step" in output for _, output in ends) == 1
    assert (folder / "final/config.json").is_file()
