"""Stops where nothing can be agreed on in a training step: set-up, evaluation, samples, a launcher that is killed."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest

from launched import TINY, finish, mentioning, start, wait_for
from shardwise.launch.processes import descendants
from shardwise.liveness import alive

LONG = ["schedule.max_steps=2000", "launch.processes=2"]
IN_SETUP = {
    "tokenising": {"FAULT": "hang@*:0", "FAULT_AT": "shardwise.train.inputs:load_data"},
    # Rank 1 is at the rendezvous, inside a call that runs no signal handler, when it is told.
    "one ahead": {"FAULT": "hang@0:0", "FAULT_AT": "shardwise.train.inputs:load_data"},
    "loading": {"FAULT": "hang@*:0", "FAULT_AT": "shardwise.train.setup:make_engine"},
}


def rank(number: int, folder: Path) -> int:
    """The pid of a rank; 0 when it is not there."""
    for pid in mentioning(str(folder)):
        try:
            if f"RANK={number}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                return pid
        except OSError:
            continue
    return 0


@pytest.mark.parametrize("where", list(IN_SETUP))
def test_a_signal_to_one_rank_during_set_up(tmp_path: Path, where: str) -> None:
    folder, says = tmp_path / "run", tmp_path / "there"
    process = start("./launch.sh", *TINY, *LONG, f"run.output_dir={folder}", FAULT_SAYS=str(says), **IN_SETUP[where])
    wait_for(lambda: says.exists() and rank(1, folder), 90, "the fault")
    time.sleep(3)  # for rank 1 to get as far as it can
    struck = time.monotonic()
    os.kill(rank(1, folder), signal.SIGTERM)
    code, output = finish(process, 30)
    assert code == 3 and time.monotonic() - struck < 30, output[-2000:]
    assert output.strip().splitlines()[-1] == (
        "stopped before the first step (SIGTERM): nothing was begun and there is no checkpoint yet. "
        "Start again to go on")
    assert "Traceback" not in output and mentioning(str(folder)) == []


def test_a_time_limit_during_set_up(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    process = start("./launch.sh", *TINY, *LONG, "run.time_limit=8s", f"run.output_dir={folder}",
                    **IN_SETUP["tokenising"])
    code, output = finish(process, 60)
    assert code == 3 and "stopped before the first step (run.time_limit)" in output, output[-2000:]
    assert mentioning(str(folder)) == []


@pytest.mark.parametrize(("at", "phase"), [("losses", "evaluating"), ("_cut_short", "answering samples")])
def test_a_signal_to_one_rank_during_a_long_evaluation(tmp_path: Path, at: str, phase: str) -> None:
    """Both leave it at the same batch and save; the next start makes the evaluation that is owed."""
    folder, says = tmp_path / "run", tmp_path / "there"
    words = ["recipes/tiny.yaml", "schedule.max_steps=4", "launch.processes=2", "eval.every_steps=2",
             "eval.generate_samples=2", "eval.max_new_tokens=100", f"run.output_dir={folder}"]
    slow_from = {"losses": 2, "_cut_short": 200}[at]  # in the evaluation after step 2, not in the one at the start
    process = start("./launch.sh", *words, FAULT=f"slow1@*:{slow_from}", FAULT_SAYS=str(says),
                    FAULT_AT=f"shardwise.train.evaluate:{at}")
    wait_for(says.exists, 120, "the evaluation")
    struck = time.monotonic()
    os.kill(rank(1, folder), signal.SIGTERM)
    code, output = finish(process, 30)
    assert code == 3 and time.monotonic() - struck < 30, output[-2000:]
    assert "stopped after step 2 of 4" in output
    [checkpoint] = (folder / "checkpoints").glob("step-*")
    assert json.loads((checkpoint / "meta.json").read_text())["evaluation_owed"] is True
    code, output = finish(start("./launch.sh", *words))
    assert code == 0, output[-2000:]
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "eval_loss" in line] == [0, 2, 4]
    assert [line["step"] for line in lines if "loss" in line] == [1, 2, 3, 4]


GONE = {
    "tokenising in processes": (["data.workers=2"], {"FAULT": "sleep60@*:0",
                                                     "FAULT_AT": "shardwise.data.store.worker:encoded"}),
    "waiting in a collective": ([], {"FAULT": "hang@0:2"}),
    "saving": (["checkpoint.every_steps=2"], {"FAULT": "sleep60@*:0", "FAULT_AT": "shardwise.train.loop:save"}),
}


@pytest.mark.parametrize("where", list(GONE))
def test_all_are_gone_ten_seconds_after_the_launcher_was_killed(tmp_path: Path, where: str) -> None:
    folder, says = tmp_path / "run", tmp_path / "there"
    words, fault = GONE[where]
    process = start("./launch.sh", *TINY, *LONG, *words, f"run.output_dir={folder}", FAULT_SAYS=str(says),
                    SHARDWISE_CACHE=str(tmp_path / "cache"), **fault)
    wait_for(says.exists, 90, "the fault")
    time.sleep(1)
    everyone = descendants(process.pid)
    assert len(everyone) >= 3
    process.kill()
    finish(process, 30)
    wait_for(lambda: not any(map(alive, everyone)) and mentioning(str(folder)) == [], 10, "the last process")
