"""Sweep files: what `wandb agent` will run is a command line this project accepts (B64)."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from shardwise.config.load import LEAVES, load

ROOT = Path(__file__).resolve().parents[2]
SWEEPS = sorted((ROOT / "sweeps").glob("*.yaml"))


def trials(sweep: dict[str, Any]) -> list[dict[str, Any]]:
    names = list(sweep["parameters"])
    return [dict(zip(names, values, strict=True))
            for values in itertools.product(*(sweep["parameters"][name]["values"] for name in names))]


def words(program: str, command: list[str], trial: dict[str, Any]) -> list[str]:
    """The command of a trial, put together as `wandb agent` does."""
    args = [f"--{name}={value}" for name, value in trial.items()]
    macros = {"${program}": [program], "${args}": args}
    return [word for part in command for word in macros.get(part, [part])]


@pytest.mark.parametrize("path", SWEEPS, ids=lambda path: path.stem)
def test_every_trial_is_accepted(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    sweep = YAML(typ="safe").load(path)
    assert sweep["metric"] == {"name": "eval_loss", "goal": "minimize"}
    assert set(sweep["parameters"]) <= set(LEAVES)
    assert not {"schedule.max_steps", "schedule.epochs"} & set(sweep["parameters"])
    for trial in trials(sweep):
        program, recipe, *settings = words(sweep["program"], sweep["command"], trial)
        assert (ROOT / program).is_file()
        loaded = load(recipe, settings)
        assert {name: loaded.origins[name] for name in trial} == dict.fromkeys(trial, "command line")
        assert loaded.config.optim.lr == trial["optim.lr"] and loaded.config.tracking.backends == ("wandb",)
