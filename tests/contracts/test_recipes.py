"""Every file a user can start from loads, resolves and says what it is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from shardwise.config import show
from shardwise.config.deepspeed import STAGES, deepspeed_dict
from shardwise.config.launcher import Launcher, from_environment
from shardwise.config.load import load
from shardwise.config.resolve import resolve

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))
ACCELERATE = sorted((ROOT / "accelerate_configs").glob("*.yaml"))
DEEPSPEED = sorted((ROOT / "ds_configs").glob("*.json"))


def test_there_are_some():
    assert len(RECIPES) >= 6
    assert [p.stem for p in ACCELERATE] == ["ddp", "zero1", "zero2", "zero3", "zero3_offload"]
    assert [p.stem for p in DEEPSPEED] == ["zero1", "zero2", "zero3", "zero3_offload"]


@pytest.mark.parametrize("path", RECIPES, ids=lambda p: p.stem)
def test_recipe_resolves_and_its_header_is_true(path):
    loaded = load(path)
    processes = loaded.config.launch.processes
    header = [line[2:] for line in path.read_text().splitlines() if line.startswith("# ")]
    for word in ("What:", "Hardware:", "Expected:", "Command"):
        assert any(line.startswith(word) for line in header), f"{path.name}: no line {word}"
    arithmetic = header[-1]  # "64 examples/step = 2 ranks x ~4 micro-batches x <= 8,192 tokens"
    ranks = int(arithmetic.split(" = ")[1].split(" rank")[0])
    assert processes in ("auto", ranks)
    resolved = resolve(loaded, world_size=ranks, launcher=Launcher())
    assert show.arithmetic(resolved).split(" x ")[0] == arithmetic.split(" x ")[0]
    assert show.arithmetic(resolved).split(" x ")[2] == arithmetic.split(" x ")[2]


@pytest.mark.parametrize("path", ACCELERATE, ids=lambda p: p.stem)
def test_accelerate_config_names_its_strategy(path):
    document = YAML(typ="safe").load(path.read_text())
    env = {"ACCELERATE_MIXED_PRECISION": "no"}
    if document["distributed_type"] == "DEEPSPEED":
        env |= {"ACCELERATE_USE_DEEPSPEED": "true",
                "ACCELERATE_DEEPSPEED_CONFIG_FILE": str(ROOT / document["deepspeed_config"]["deepspeed_config_file"])}
    launcher = from_environment(env)
    assert launcher.strategy == path.stem.removesuffix("_offload")
    assert launcher.offload == ("params" if path.stem.endswith("_offload") else "none")


@pytest.mark.parametrize("path", DEEPSPEED, ids=lambda p: p.stem)
def test_deepspeed_json_holds_zero_knobs_only(path):
    assert list(json.loads(path.read_text())) == ["zero_optimization"]
    strategy = path.stem.removesuffix("_offload")
    resolved = deepspeed_dict(path, strategy=strategy, precision="bf16", optimizer="adamw", max_grad_norm=1.0,
                              offload="params" if path.stem.endswith("_offload") else "none", world_size=2)
    assert resolved["zero_optimization"]["stage"] == STAGES[strategy]
    assert "auto" not in json.dumps(resolved)
