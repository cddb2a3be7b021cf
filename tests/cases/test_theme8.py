"""cases.md, theme 8: hangs; and B41 of theme 5. With real ranks, from the outside."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path

import pytest

from launched import launch, mentioning
from torture.stops import strike

TWO = "launch.processes=2"


@pytest.mark.parametrize("strategy", ["ddp", "zero2"])
def test_b41_b51_a_signal_to_one_rank_alone(tmp_path: Path, strategy: str) -> None:
    """The long form of this is tests/torture/stops.py."""
    strike(tmp_path / "run", tmp_path / "tmp", random.Random(7), strategy=strategy)


def test_b52_what_gathers_is_called_on_every_rank(tmp_path: Path) -> None:
    """zero3: checkpoints on the way, the final model, and an adapter trained on it."""
    words = ["strategy=zero3", "schedule.max_steps=2", "checkpoint.every_steps=1", TWO]
    whole, adapter = tmp_path / "whole", tmp_path / "adapter"
    code, output = launch(*words, f"run.output_dir={whole}", timeout=60)
    assert code == 0, output[-2000:]
    code, output = launch(*words, f"model.path={whole / 'final'}", "model.from_config=null", "adapter.kind=lora",
                          "adapter.rank=2", f"run.output_dir={adapter}", timeout=60)
    assert code == 0, output[-2000:]
    for run, weights in ((whole, "model.safetensors"), (adapter, "adapter_model.safetensors")):
        assert [path.name for path in sorted((run / "final").glob("*.safetensors"))] == [weights]
        steps = [json.loads((path / "meta.json").read_text())["step"]
                 for path in sorted((run / "checkpoints").glob("step-*"))]
        assert steps == [1, 2]


@pytest.mark.parametrize(("rank", "at"), [
    ("*", "shardwise.data.store.cached:build"),    # one tokenises, the other waits for its lock
    ("0", "shardwise.train.inputs:load_data")])    # the other has its own cache, and waits at the rendezvous
def test_b53_tokenising_may_take_longer_than_a_collective(tmp_path: Path, rank: str, at: str) -> None:
    code, output = launch(TWO, "schedule.max_steps=1", "launch.timeout_minutes=0.17", f"run.output_dir={tmp_path}/run",
                          FAULT=f"sleep25@{rank}:0", FAULT_AT=at, SHARDWISE_CACHE=str(tmp_path / "cache"))
    assert code == 0, output[-2000:]


def test_b53_and_still_a_collective_does_not(tmp_path: Path) -> None:
    """The time-out is meant for the collectives of the training, where it holds."""
    began = time.monotonic()
    code, output = launch(TWO, "schedule.max_steps=6", "launch.timeout_minutes=0.17", f"run.output_dir={tmp_path}/run",
                          FAULT="hang@1:2")
    last = output.strip().splitlines()[-1]
    assert code == 1 and last.startswith("rank 1 (") and "at step 2, while training" in last, output[-2000:]
    assert "a call that does not return" in last and time.monotonic() - began < 100


def test_b53_a_failure_while_tokenising_ends_every_rank(tmp_path: Path) -> None:
    began = time.monotonic()
    code, output = launch(TWO, f"run.output_dir={tmp_path}/run", FAULT="raise@0:0",
                          FAULT_AT="shardwise.train.inputs:load_data")
    last = output.strip().splitlines()[-1]
    assert code == 1 and last.startswith("rank 0 (") and "while tokenising: RuntimeError: struck by the test" in last
    assert time.monotonic() - began < 60 and mentioning(f"{tmp_path}/run") == []
