"""Values as written against the types of the settings (B71)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shardwise.config.document import compose
from shardwise.config.load import load
from shardwise.config.schema import SourceConfig
from shardwise.config.values import Misfit, duration_seconds, plain, read
from shardwise.errors import ConfigError


def value(text: str, hint: Any) -> Any:
    node = compose(text, "here")
    assert node is not None
    return read(node, hint)


@pytest.mark.parametrize(("text", "number"), [
    ("1e-5", 1e-5), ("5E-4", 5e-4), ("1.0e-5", 1e-5), ('"1e-5"', 1e-5), ("1", 1.0), ("-.5", -0.5), ("+1.", 1.0)])
def test_b71_floats(text: str, number: float) -> None:
    assert value(text, float) == number


@pytest.mark.parametrize("text", ["no", "off", "0123", "12:30", "null", "1_000", "1,5", "0x1f", "nan", ".inf",
                                  "e5", ".", "true", "[1]"])
def test_b71_not_floats(text: str) -> None:
    with pytest.raises(Misfit, match="a number"):
        value(text, float)


@pytest.mark.parametrize("text", ["no", "off", "0123", "12:30", "null", "1_000", "1.0", "1e3", "0x1f", "true"])
def test_b71_not_whole_numbers(text: str) -> None:
    with pytest.raises(Misfit, match="a whole number"):
        value(text, int)


@pytest.mark.parametrize("text", ["no", "off", "yes", "on", "0", "1", "TRUE", "null"])
def test_b71_truth_values_are_true_and_false_only(text: str) -> None:
    with pytest.raises(Misfit, match="true or false"):
        value(text, bool)


@pytest.mark.parametrize("text", ["no", "off", "0123", "12:30", "1e-5", "true"])
def test_b71_text_stays_as_written(text: str) -> None:
    assert value(text, str) == text


@pytest.mark.parametrize("text", ["no", "off", "0123", "12:30", "1_000"])
def test_b71_the_key_is_named_with_its_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "r.yaml"
    path.write_text(f"model: {{path: a}}\ndata: {{train: [a.jsonl]}}\noptim:\n  lr: {text}\n")
    with pytest.raises(ConfigError) as caught:
        load(path)
    assert caught.value.faults == [f"{path}:4: optim.lr={text} must be a number"]


@pytest.mark.parametrize(("text", "seconds"), [("90s", 90), ("30m", 1800), ("12h", 43200), ("1h30m", 5400)])
def test_durations(text: str, seconds: int) -> None:
    assert duration_seconds(text) == seconds


@pytest.mark.parametrize("text", ["", "90", "1m1h", "1.5h", "-1s", "12:30"])
def test_not_durations(text: str) -> None:
    with pytest.raises(Misfit, match="90s"):
        duration_seconds(text)


def test_null_is_only_for_what_may_be_unset() -> None:
    assert value("null", float | None) is None and value("~", str | None) is None
    assert value("'null'", str | None) == "null"
    with pytest.raises(Misfit):
        value("null", str)


def test_lists() -> None:
    assert value("[a, b]", tuple[str, ...]) == ("a", "b") and value("a", tuple[str, ...]) == ("a",)
    assert value("[0.9, 0.95]", tuple[float, float]) == (0.9, 0.95)
    with pytest.raises(Misfit, match="a list of 2"):
        value("[0.9]", tuple[float, float])


def test_sources() -> None:
    assert value("[a.jsonl, {hub: x/y, split: dev}]", tuple[SourceConfig, ...]) == (
        SourceConfig(path="a.jsonl"), SourceConfig(hub="x/y", split="dev"))
    with pytest.raises(Misfit, match="either `path` or `hub`"):
        value("[{path: a, hub: b}]", tuple[SourceConfig, ...])
    with pytest.raises(Misfit, match="not 'file'"):
        value("[{file: a}]", tuple[SourceConfig, ...])


def test_free_mappings_follow_yaml_1_2() -> None:
    node = compose("{a: 1, b: 1.5, c: true, d: null, e: no, f: [1e-5], g: '1'}", "here")
    assert node is not None
    assert plain(node) == {"a": 1, "b": 1.5, "c": True, "d": None, "e": "no", "f": [1e-5], "g": "1"}


@pytest.mark.parametrize(("setting", "said"), [
    ("batch.examples_per_step=0", "at least 1"), ("schedule.warmup_ratio=1.5", "from 0 to 1"),
    ("optim.lr=0", "more than 0"), ("optim.lr=1e999", "a finite number"), ("optim.betas=[0.9, 1]", "from 0 to"),
    ("launch.main_port=70000", "from 1 to 65535"), ("strategy=zero4", "one of auto, ddp, zero1"),
    ("launch.processes=many", "auto or a whole number"), ("launch.processes=0", "auto or at least 1"),
    ("run.time_limit=soon", "90s, 30m"), ("model.gradient_checkpointing=off", "auto or true or false")])
def test_bounds_and_choices(tmp_path: Path, setting: str, said: str) -> None:
    path = tmp_path / "r.yaml"
    path.write_text("model: {path: a}\ndata: {train: [a.jsonl]}\n")
    with pytest.raises(ConfigError) as caught:
        load(path, [setting])
    [fault] = caught.value.faults
    assert fault.startswith(f"command line: {setting} must be ") and said in fault
