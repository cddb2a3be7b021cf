"""Memory that runs out where a step cannot be finished: the launcher starts again with half, by itself."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from launched import launch, metrics

SETTINGS = ["strategy=zero3", "launch.processes=2", "schedule.max_steps=4", "checkpoint.every_steps=2",
            "batch.max_tokens_per_micro_batch=1024", "batch.examples_per_step=16"]


def test_zero3_goes_on_with_half_and_the_same_curve(tmp_path: Path) -> None:
    clean, run = tmp_path / "clean", tmp_path / "run"
    code, output = launch(*SETTINGS, f"run.output_dir={clean}")
    assert code == 0, output[-2000:]
    micro_batches = sum(line["micro_batches"] for line in metrics(clean)[:2])
    code, output = launch(*SETTINGS, f"run.output_dir={run}", FAULT=f"oom@1:{micro_batches}",
                          FAULT_AT="shardwise.train.step:losses", FAULT_ONCE=str(tmp_path / "struck"))
    assert code == 0, output[-3000:]
    assert "out of memory in step 3 with micro-batches of up to 1,024 tokens" in output
    assert "starting again from the newest complete checkpoint (with micro-batches of at most 512 tokens)" in output
    assert json.loads((run / "micro_batch.json").read_text()) == {"asked": 1024, "max_tokens_per_micro_batch": 512}
    assert [line["step"] for line in metrics(run)] == [1, 2, 3, 4]
    assert sum(line["micro_batches"] for line in metrics(run)[2:]) > sum(
        line["micro_batches"] for line in metrics(clean)[2:])
    for got, want in zip(metrics(run), metrics(clean), strict=True):
        for key in ("loss", "grad_norm", "lr", "tokens"):
            assert got[key] == pytest.approx(want[key], rel=1e-5)
