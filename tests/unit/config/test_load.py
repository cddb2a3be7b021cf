"""Precedence, origins and suggestions (B70)."""

from __future__ import annotations

import random
import string
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.config.load import LEAVES, load, nearest
from shardwise.errors import ConfigError


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "r.yaml"
    path.write_text("model: {path: a}\ndata:\n  train: [a.jsonl]\noptim: {lr: 1e-3}\nschedule: {epochs: 2}\n")
    return path


def test_b70_flag_beats_file_beats_default(recipe: Path) -> None:
    loaded = load(recipe, ["optim.lr=1e-2"])
    assert loaded.config.optim.lr == 1e-2 and loaded.origins["optim.lr"] == "command line"
    loaded = load(recipe)
    assert loaded.config.optim.lr == 1e-3 and loaded.origins["optim.lr"] == f"{recipe}:4"
    assert loaded.config.optim.eps == 1e-8 and loaded.origins["optim.eps"] == "default"


def test_a_flag_replaces_the_files_other_way_to_say_it(recipe: Path) -> None:
    schedule = load(recipe, ["schedule.max_steps=4"]).config.schedule
    assert (schedule.epochs, schedule.max_steps) == (None, 4)
    with pytest.raises(ConfigError, match="both set; keep one"):
        load(recipe, ["schedule.max_steps=4", "schedule.epochs=1"])


def test_names_follow_the_recipe(recipe: Path) -> None:
    run = load(recipe).config.run
    assert (run.name, run.output_dir) == ("r", "runs/r")
    assert load(recipe, ["run.name=x"]).config.run.output_dir == "runs/x"
    assert load(recipe, ["run.output_dir=/y"]).config.run.output_dir == "/y"


def edits(key: str, rng: random.Random) -> str:
    """`key` with one letter of its last part dropped, doubled, changed, or swapped with the next."""
    head, _, leaf = key.rpartition(".")
    at = rng.randrange(len(leaf))
    kind = rng.choice(["drop", "double", "change", "swap"])
    if kind == "drop":
        leaf = leaf[:at] + leaf[at + 1:]
    elif kind == "double":
        leaf = leaf[:at] + leaf[at] + leaf[at:]
    elif kind == "change":
        leaf = leaf[:at] + rng.choice(string.ascii_lowercase) + leaf[at + 1:]
    elif at + 1 < len(leaf):
        leaf = leaf[:at] + leaf[at + 1] + leaf[at] + leaf[at + 2:]
    return f"{head}.{leaf}" if head else leaf


@settings(max_examples=4, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10**9))
def test_b70_one_slip_of_the_finger_is_recognised(seed: int) -> None:
    rng = random.Random(seed)
    tried = [(key, edits(key, rng)) for key in LEAVES for _ in range(5)]
    tried = [(key, typo) for key, typo in tried if typo not in LEAVES]
    right = sum(nearest(typo) == key for key, typo in tried)
    assert right >= 0.95 * len(tried), f"{right} of {len(tried)}"


@pytest.mark.parametrize(("typo", "meant"), [
    ("optim.learing_rate", "optim.lr"), ("data.max_lenght", "data.max_length"), ("stratgy", "strategy"),
    ("optim.warmup_ratio", "schedule.warmup_ratio"), ("lora_r", "adapter.rank"), ("output-dir".replace("-", "_"),
                                                                                 "run.output_dir")])
def test_b70_nearest(typo: str, meant: str) -> None:
    assert nearest(typo) == meant


def test_every_setting_says_what_it_means() -> None:
    """A line of documentation beneath each field, as `shardwise config` and the reader rely on it."""
    source = (Path(__file__).parents[3] / "src/shardwise/config/schema.py").read_text().splitlines()
    for key in LEAVES:
        name = key.rsplit(".", 1)[-1]
        places = [n for n, line in enumerate(source) if line.startswith(f"    {name}: ") and "field(" not in line]
        assert places and all(source[n + 1].strip().startswith('"""') for n in places), key
