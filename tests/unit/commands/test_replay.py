"""What a replay compares and refuses; that it trains is shown in e2e/test_export_and_replay.py."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from exported import make_run
from shardwise import cli
from shardwise.commands import replay
from shardwise.config.load import load
from shardwise.export.runs import open_run


@pytest.mark.parametrize(("was", "now", "apart"), [
    (2.0, 2.0, 0.0), (0.0, 0.0, 0.0), (2.0, 1.0, 0.5), (1.0, 2.0, 0.5), (0.0, 1e-9, 1.0),
    (None, None, 0.0), (None, 1.0, float("inf")), (1.0, float("nan"), float("inf"))])
def test_relative_difference(was: float | None, now: float | None, apart: float) -> None:
    assert replay.difference(was, now) == apart


def test_a_step_counts_once_and_evaluations_do_not() -> None:
    lines = [{"step": 0, "eval_loss": 7.0}, {"step": 1, "lr": 0.1, "loss": 6.0}, {"step": 2, "lr": 0.1, "loss": 9.0},
             {"step": 2, "lr": 0.1, "skipped": "spike"}, {"step": 2, "eval_loss": 7.0}]
    assert replay.training_lines(lines) == [lines[1], lines[3]]


@pytest.mark.parametrize(("precision", "factor", "code"), [
    ("fp32", 1 + 9e-6, 0), ("fp32", 1 + 2e-5, 1), ("bf16", 1 + 1e-2, 0), ("bf16", 1 + 3e-2, 1),
    ("fp32", float("nan"), 1)])
def test_the_tolerance_is_that_of_the_precision(tmp_path: Path, precision: str, factor: float, code: int,
                                                capsys: pytest.CaptureFixture[str]) -> None:
    made = make_run(tmp_path, f"precision={precision}")
    recorded = [{"step": n, "loss": 5.0, "grad_norm": 0.5} for n in (1, 2, 3)]
    again = [line | {"grad_norm": line["grad_norm"] * (factor if line["step"] == 2 else 1)} for line in recorded]
    assert replay._compare(open_run(str(made.folder)), recorded, again, []) == code
    out = capsys.readouterr().out.splitlines()[-5:]
    assert out[0].split()[:2] == ["step", "loss"] and "(grad_norm of step 2)" in out[-1]
    assert ("NOT the same" in out[-1]) == bool(code)


def test_the_recipe_of_a_replay_differs_in_nothing_that_moves_the_curve(tmp_path: Path) -> None:
    made = make_run(tmp_path, "optim.lr=3e-4", "data.supervise=[assistant]", "schedule.warmup_ratio=0.1",
                    "eval.every_steps=2", f"data.eval=[{tmp_path / 'chats.jsonl'}]", "checkpoint.every_steps=1",
                    "run.time_limit=5m")
    run = open_run(str(made.folder))
    recipe = tmp_path / "replay.yaml"
    recipe.write_text(replay._recipe(run, 3, tmp_path / "again"))
    config = load(recipe).config
    for section in ("model", "adapter", "batch", "optim", "schedule", "precision"):
        assert getattr(config, section) == getattr(run.config, section), section
    assert config.data.train == run.config.data.train and config.data.supervise == ("assistant",)
    assert config.run.stop_after == 3 and config.run.time_limit is None and config.checkpoint.every_steps is None
    assert not config.checkpoint.at_end and config.data.eval == () and config.tracking.backends == ()
    assert (config.strategy, config.launch.processes) == ("zero3", 2)


@pytest.mark.parametrize(("words", "said"), [
    (["--steps", "5"], "--steps 5: the run recorded 4 steps"),
    (["--steps", "0"], "repeat at least one step"),
    (["--steps", "2", "optim.lr=1"], "optim.lr changes what is computed"),
    (["--steps", "2", "strategi=ddp"], "unknown key 'strategi'")])
def test_mistakes_are_told_in_words(tmp_path: Path, words: list[str], said: str, monkeypatch: pytest.MonkeyPatch,
                                    capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    made = make_run(tmp_path)
    assert cli.main(["replay", str(made.folder), *words]) == 2
    assert said in capsys.readouterr().err


def test_a_record_that_begins_later_has_nothing_to_compare_with(tmp_path: Path, capsys: pytest.CaptureFixture[str]
                                                                ) -> None:
    made = make_run(tmp_path)
    lines = (made.folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (made.folder / "metrics.jsonl").write_text("".join(lines[2:]))
    assert cli.main(["replay", str(made.folder), "--steps", "1"]) == 2
    assert "does not begin with step 1" in capsys.readouterr().err


def test_settings_with_a_secret_left_out_cannot_be_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                            capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    made = make_run(tmp_path)
    facts = json.loads((made.folder / "manifest.json").read_text())
    facts["config"]["data"]["train"][0]["path"] = "https://***@host/x.jsonl"
    (made.folder / "manifest.json").write_text(json.dumps(facts))
    assert cli.main(["replay", str(made.folder), "--steps", "1"]) == 2
    assert "a secret was left out of its manifest" in capsys.readouterr().err
