"""Recipes and command lines as written: lines, duplicates, the forms a setting may take (B64, B70)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shardwise.config.document import entries_of_overrides
from shardwise.config.load import Loaded, load
from shardwise.errors import ConfigError

BASE = "model: {path: a}\ndata: {train: [a.jsonl]}\nadapter: {kind: lora, rank: 4, alpha: 8}\n"


def write(tmp_path: Path, more: str = "") -> Path:
    path = tmp_path / "r.yaml"
    path.write_text(BASE + more)
    return path


def get(loaded: Loaded, key: str) -> Any:
    value: Any = loaded.config
    for name in key.split("."):
        value = getattr(value, name)
    return value


@pytest.mark.parametrize(("words", "key", "expected"), [
    ("optim.lr=1e-4", "optim.lr", 1e-4), ("--optim.lr=1e-4", "optim.lr", 1e-4),
    ("--optim.lr 1e-4", "optim.lr", 1e-4),
    ("--optim.weight-decay=0.1", "optim.weight_decay", 0.1), ("optim.weight-decay=0.1", "optim.weight_decay", 0.1),
    ("--optim.weight_decay 0.1", "optim.weight_decay", 0.1),
    ("--data.packing=true", "data.packing", True), ("--data.packing=True", "data.packing", True),
    ("--data.packing=false", "data.packing", False), ("--data.packing=False", "data.packing", False),
    ("--data.packing", "data.packing", True), ("--data.packing --optim.lr=1e-4", "data.packing", True),
    ("--data.packing optim.lr=1e-4", "data.packing", True), ("data.packing=false", "data.packing", False),
    ("--optim.max_grad_norm=None", "optim.max_grad_norm", None),
    ("optim.max_grad_norm=null", "optim.max_grad_norm", None),
    ("optim.max_grad_norm=", "optim.max_grad_norm", None),
    ("--adapter.targets=['q_proj','v_proj']", "adapter.targets", ("q_proj", "v_proj")),
    ("adapter.targets=[q_proj]", "adapter.targets", ("q_proj",)),
    ("adapter.targets=q_proj", "adapter.targets", ("q_proj",)),
    ("--optim.momentum -0", "optim.momentum", 0.0), ("run.name=a=b", "run.name", "a=b"),
    ("optim.lr=1 optim.lr=2", "optim.lr", 2.0)])
def test_b64_accepted_forms(tmp_path: Path, words: str, key: str, expected: object) -> None:
    assert get(load(write(tmp_path), words.split()), key) == expected


def test_b64_a_nested_override_keeps_its_siblings(tmp_path: Path) -> None:
    adapter = load(write(tmp_path), ["--adapter.rank=8"]).config.adapter
    assert (adapter.kind, adapter.rank, adapter.alpha) == ("lora", 8, 8.0)


@pytest.mark.parametrize(("word", "said"), [
    ("nonsense", "'nonsense' is not a setting"), ("--optim.learing-rate=1", "did you mean 'optim.lr'"),
    ("--no-data.packing", "unknown key 'no_data.packing'"),
    ("--data.no-packing", "did you mean 'data.packing=false'"),
    ("=3", "'=3' is not a setting"), ("--", "'--' is not a setting"), ("adapter=lora", "'adapter' is a section"),
    ("--trailing", "unknown key 'trailing'"), ("optim.lr=[", "not valid YAML"),
    ("data.packing=maybe", "data.packing=maybe must be"), ("--optim.lr", "optim.lr=true must be a number")])
def test_b64_b70_refused_with_the_word(tmp_path: Path, word: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(write(tmp_path), [word])
    assert len(caught.value.faults) == 1 and said in str(caught.value) and "command line" in str(caught.value)


@pytest.mark.parametrize(("more", "said"), [
    ("optim:\n  learing_rate: 1\n", ":5: unknown key 'optim.learing_rate'; did you mean 'optim.lr'"),
    ("schedule:\n  weight_decay: 1\n", "'schedule.weight_decay'; did you mean 'optim.weight_decay'"),
    ("lr: 1\n", ":4: unknown key 'lr'; did you mean 'optim.lr'"),
    ("optim:\n  lr: 1\n  lr: 2\n", ":6: 'optim.lr' is given twice (first in line 5)"),
    ("optim:\n  weight_decay: 1\n  weight-decay: 2\n", ":6: 'optim.weight_decay' is given twice"),
    ("optim: {}\noptim: {lr: 1}\n", ":5: 'optim' is given twice"),
    ("optim: 3\n", ":4: 'optim' is a section and needs keys beneath it"),
    ("optim: [1]\n", ":4: 'optim' is a section"),
    ("precision: {a: 1}\n", ":4: unknown key 'precision.a'"),
    ("gradient_accumulation_steps: 4\n", "did you mean 'batch.examples_per_step'"),
    ("optim:\n  lr: {a: 1}\n", "optim.lr"), ("optim:\n  lr: [1]\n", ":5: optim.lr=[1] must be a number")])
def test_b70_misspelt_recipe(tmp_path: Path, more: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(write(tmp_path, more))
    assert said in str(caught.value)


@pytest.mark.parametrize(("text", "said"), [
    ("a: [1\nb: 2\n", "not valid YAML"), ("- a\n", ":1: a recipe is a mapping"),
    ("text", ":1: a recipe is a mapping"),
    ("a: &x 1\nb: *y\n", "not valid YAML"), ("\tx: 1\n", "not valid YAML")])
def test_unreadable_recipe(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "r.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load(path)
    assert said in str(caught.value) and str(path) in str(caught.value)


def test_not_utf8_and_no_file(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_bytes(b"a: \xff\n")
    for place, said in ((path, "cannot be read"), (tmp_path, "cannot be read"), (tmp_path / "no", "no such")):
        with pytest.raises(ConfigError, match=said):
            load(place)


def test_hyphens_in_the_recipe(tmp_path: Path) -> None:
    assert load(write(tmp_path, "optim:\n  weight-decay: 0.5\n")).config.optim.weight_decay == 0.5


def test_sections_with_all_keys_commented_out(tmp_path: Path) -> None:
    assert load(write(tmp_path, "optim:\n  # lr: 1\neval: null\n")).config.optim.lr == 1e-5


def test_every_fault_is_collected(tmp_path: Path) -> None:
    faults: list[str] = []
    entries_of_overrides(["a", "b=1", "c", "--d=["], faults)
    assert len(faults) == 3
