"""A rank that stalls ends the job, and is named with its step, phase and stack; one that dies may be restarted."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from launched import TINY, finish, launch, mentioning, metrics, start, wait_for
from shardwise.launch.ports import free_port

SIX = ["schedule.max_steps=6", "launch.processes=2", "launch.stall_minutes=0.1"]


@pytest.mark.parametrize(("kind", "words"), [("hang", "no progress for"), ("freeze", "no sign of life for")])
def test_the_rank_that_stalls_is_named_and_all_are_ended(tmp_path: Path, kind: str, words: str) -> None:
    """The other one waits for it in a collective, and is not to blame."""
    folder = tmp_path / "run"
    process = start("./launch.sh", *TINY, *SIX, f"run.output_dir={folder}", FAULT=f"{kind}@1:2")
    wait_for(lambda: len(metrics(folder)) >= 2, 90, "two steps")
    struck = time.monotonic()
    code, output = finish(process, 66)
    assert time.monotonic() - struck < 66
    last = output.strip().splitlines()[-1]
    assert code == 1 and last.startswith("rank 1 ("), output[-3000:]
    assert "stalled at step 2, while training" in last and words in last and "launch.stall_minutes=0.1" in last
    assert ("SIGSTOP" in last) == (kind == "freeze")
    told = output[output.index("rank 1 hangs in" if kind == "hang" else "rank 1 last seen in"):]
    # Where it hangs, exactly; of a frozen one its last beat has told, a little earlier.
    assert "sitecustomize.py:" in told or (kind == "freeze" and "where it went from there was not seen" in told)
    assert mentioning(str(folder)) == []


def test_without_our_launcher_ranks_watch_themselves(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    process = start(sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port",
                    str(free_port()), "-m", "shardwise.train", *TINY, *SIX, f"run.output_dir={folder}",
                    FAULT="hang@1:2")
    code, output = finish(process, 120)
    assert code == 1 and "stalled at step 2, while training" in output, output[-3000:]
    assert "rank 0 (" not in output  # it waits longer than the one it waits for
    # torchrun's report, which is printed last, says it too.
    assert "stalled at step 2" in output[output.index("Root Cause"):]
    assert mentioning(str(folder)) == []


def test_a_set_up_may_take_longer(tmp_path: Path) -> None:
    code, output = launch(*SIX[1:], "schedule.max_steps=1", f"run.output_dir={tmp_path / 'run'}",
                          FAULT="sleep15@*:0", FAULT_AT="shardwise.train.setup:make_engine")
    assert code == 0, output[-2000:]


def test_our_launcher_starts_again_as_often_as_it_may(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    words = [*SIX, "checkpoint.every_steps=2", "launch.restarts=1", f"run.output_dir={folder}"]
    code, output = launch(*words, FAULT="kill@1:3", FAULT_ONCE=str(tmp_path / "struck"))
    assert code == 0, output[-2000:]
    assert output.count("(restart 1 of 1)") == 1 and "going on after step 2" in output
    assert [line["step"] for line in metrics(folder)] == [1, 2, 3, 4, 5, 6]


def test_and_then_no_more(tmp_path: Path) -> None:
    code, output = launch(*SIX, "launch.restarts=1", f"run.output_dir={tmp_path / 'run'}", FAULT="kill@1:1")
    last = output.strip().splitlines()[-1]
    assert code == 1 and output.count("starting again") == 1 and last.startswith("rank 1 ("), output[-2000:]
    assert "at step 1, while training" in last and "SIGKILL" in last
