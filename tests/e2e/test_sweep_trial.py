"""One trial of sweeps/lr.yaml as the wandb agent starts it: its settings reach every rank, one run reports."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from launched import ROOT, finish, start


@pytest.fixture
def trial_folder():
    folder = ROOT / "runs" / "tiny" / "sweep-trialtest" / "abc123"
    shutil.rmtree(folder.parent, ignore_errors=True)
    yield folder
    shutil.rmtree(folder.parent, ignore_errors=True)


def test_trial(trial_folder: Path) -> None:
    sweep = YAML(typ="safe").load((ROOT / "sweeps" / "lr.yaml").read_text())
    settings = ["--optim.lr=0.01", "--schedule.warmup_ratio=0.0"]
    words = [word for part in sweep["command"]
             for word in (settings if part == "${args}" else [part.replace("${program}", sweep["program"])])]
    process = start(*words, "launch.processes=2", "schedule.max_steps=3", WANDB_SWEEP_ID="trialtest",
                    WANDB_RUN_ID="abc123", WANDB_MODE="offline")
    code, output = finish(process)
    assert code == 0, output[-2000:]
    lines = [json.loads(line) for line in (trial_folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["lr"] for line in lines if "lr" in line][0] == 0.01  # ranks that disagreed would have been refused
    assert any("eval_loss" in line for line in lines)
    assert [path.name.rsplit("-", 1)[1] for path in (trial_folder / "wandb").glob("offline-run-*")] == ["abc123"]
