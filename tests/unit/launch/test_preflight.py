"""Files a recipe names, before anything is started."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardwise.config.load import Loaded, load
from shardwise.errors import ConfigError
from shardwise.launch.preflight import check_files, demo_names, looks_local


def loaded(tmp_path: Path, text: str, *words: str) -> Loaded:
    path = tmp_path / "r.yaml"
    path.write_text(text)
    return load(path, words)


@pytest.mark.parametrize("name", ["./m", "/m", "../m", "~/m", "m.gguf", "a/b/c", "t.json", "models/a/"])
def test_can_only_be_a_path(name: str) -> None:
    assert looks_local(name)


@pytest.mark.parametrize("name", ["gpt2", "Qwen/Qwen3-0.6B", "HuggingFaceTB/SmolLM2-135M", "a/b.v1"])
def test_may_be_a_hub_name(name: str) -> None:
    assert not looks_local(name)


def test_every_missing_file_is_named_with_its_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there.jsonl").write_text("{}\n")
    config = loaded(tmp_path, "model:\n  path: ./no-model\n  tokenizer: a/b/no-tokenizer\ndata:\n"
                              "  train: [there.jsonl, no.jsonl]\n  eval: no\n  chat_template: no.jinja\n")
    with pytest.raises(ConfigError) as caught:
        check_files(config)
    assert [fault.partition(": no such")[0] for fault in caught.value.faults] == [
        f"{tmp_path}/r.yaml:5: data.train=no.jsonl", f"{tmp_path}/r.yaml:6: data.eval=no",
        f"{tmp_path}/r.yaml:2: model.path=./no-model", f"{tmp_path}/r.yaml:3: model.tokenizer=a/b/no-tokenizer",
        f"{tmp_path}/r.yaml:7: data.chat_template=no.jinja"]


def test_demo_and_hub_names_are_left_alone(tmp_path: Path) -> None:
    config = loaded(tmp_path, "model: {path: demo:m}\ndata: {train: [demo:a, {hub: org/set}], eval: [demo:a]}\n")
    check_files(config)
    assert demo_names(config) == ["demo:a", "demo:m"]
