"""Real conversations, tool calls and prose raise no false alarm."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from pair_sources import TOOL_CALLS, NoClient, folder_of
from pairs import load
from shardwise.config.schema import DataConfig, ModelConfig, SourceConfig
from shardwise.data.look.check import check
from shardwise.data.tokenizer import load_tokenizer

SMOLLM2 = ModelConfig(path="demo:smollm2-135m-instruct")


def checked(rows: list[Any], folder: Path, tokenizer: Any) -> dict[str, Any]:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return check(DataConfig(train=(SourceConfig(path=str(path)),), max_length=1 << 17), tokenizer)[0]


def test_chitchat_is_clean() -> None:
    data = DataConfig(train=(SourceConfig(path="demo:chitchat/train"),), max_length=1 << 17,
                      eval=(SourceConfig(path="demo:chitchat/eval"),))
    report, _ = check(data, load_tokenizer(SMOLLM2))
    assert report["ok"] and report["findings"] == []
    assert (report["train"]["examples"], report["eval"]["examples"]) == (3583, 189)


def test_chatterbot_has_repeats_and_one_empty_turn(tmp_path: Path) -> None:
    rows = []
    for path in sorted(folder_of("chatterbot").glob("*.yml")):
        for turns in YAML(typ="safe").load(path.read_text(encoding="utf-8"))["conversations"]:
            turns = [str(turn) for turn in turns][:len(turns) // 2 * 2]
            rows += [{"messages": [{"role": ("user", "assistant")[i % 2], "content": text}
                                   for i, text in enumerate(turns)]}] if turns else []
    report = checked(rows, tmp_path, load_tokenizer(SMOLLM2))
    distinct = {json.dumps(row) for row in rows}
    empty = sum(any(not message["content"].strip() for message in row["messages"]) for row in rows)
    found = {finding["kind"]: finding["count"] for finding in report["findings"]}
    assert found == {"empty_turn": empty, "duplicate": len(rows) - len(distinct)}
    assert len(rows) > 1900 and empty == 1  # the corpus really has one


def test_tool_calls_are_clean(tmp_path: Path) -> None:
    """Questions with tool schemas and the calls that answer them, through Qwen3's own template."""
    rows = []
    for name in TOOL_CALLS:
        asked, called = ([json.loads(line) for line in (folder_of("bfcl") / f"{name}.{part}.jsonl").read_text(
            encoding="utf-8").splitlines()] for part in ("asked", "called"))
        answers = {row["id"]: row["ground_truth"] for row in called}
        for row in asked:
            calls = [(tool, {key: values[0] for key, values in said.items() if values})
                     for call in answers[row["id"]] for tool, said in call.items()]
            calls = [{"type": "function", "function": {"name": tool, "arguments": said}} for tool, said in calls]
            rows.append({"messages": [*row["question"][0], {"role": "assistant", "content": None, "tool_calls": calls}],
                         "tools": row["function"]})
    try:
        tokenizer = load("qwen3")
    except NoClient as error:
        pytest.skip(str(error))
    report = checked(rows, tmp_path, tokenizer)
    assert report["ok"], report["findings"]
    assert report["train"]["examples"] == len(rows) > 1000


def test_prose_is_clean(tmp_path: Path) -> None:
    pages = sorted((Path(__file__).parents[4] / "docs").glob("*.md"))
    data = DataConfig(task="pretrain", train=tuple(SourceConfig(path=str(page)) for page in pages), max_length=256)
    report, _ = check(data, load_tokenizer(SMOLLM2))
    assert report["ok"] and report["train"]["rows"] == len(pages)
    said = [row["row"] for finding in report["findings"] for row in finding["rows"]]
    assert said == [f"{page}:1" for page in pages if "<|im_end|>" in page.read_text(encoding="utf-8")]
