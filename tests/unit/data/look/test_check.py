"""One planted defect of each kind is found at its line, and nothing is said of good rows."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from dist.given import TOKENIZER
from shardwise.config.load import load
from shardwise.data.faults import KINDS
from shardwise.data.look.check import check, text
from shardwise.data.store.load import load_data
from shardwise.errors import DataError
from unit.data.look.golden import DEFECTS, GOOD, TEMPLATES, chat

TOKENS: Any = AutoTokenizer.from_pretrained(TOKENIZER)
RECIPE = Path(__file__).parents[4] / "recipes" / "tiny.yaml"
Report = dict[str, Any]


def settings(folder: Path, *overrides: str) -> Any:
    held_out = folder / "eval.jsonl"
    if not held_out.exists():
        held_out.write_bytes(chat(("user", "held"), ("assistant", "out")) + b"\n")
    return load(RECIPE, [f"data.train=[{folder}/train.jsonl]", f"data.eval=[{held_out}]", *overrides]).config.data


@pytest.fixture
def checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Report]:
    monkeypatch.setenv("SHARDWISE_CACHE", str(tmp_path / "cache"))

    def run(lines: list[bytes], *overrides: str) -> Report:
        (tmp_path / "train.jsonl").write_bytes(b"\n".join(lines) + b"\n")
        report, found = check(settings(tmp_path, *overrides), TOKENS)
        assert json.loads(json.dumps(report)) == report  # what --json prints says it all
        report["text"] = text(report, found)
        return report

    return run


def test_good_rows_raise_no_alarm(checked: Callable[..., Report]) -> None:
    report = checked(GOOD)
    assert report["ok"] and report["findings"] == [] and report["train"]["examples"] == 20
    assert report["text"].endswith("nothing is wrong: training would start")


@pytest.mark.parametrize("name", DEFECTS)
def test_a_planted_row_is_found_at_its_line(name: str, checked: Callable[..., Report], tmp_path: Path) -> None:
    kind, line = DEFECTS[name]
    report = checked([*GOOD[:5], line, *GOOD[5:]])
    place = f"{tmp_path}/train.jsonl:6"
    assert [(f["kind"], f["count"]) for f in report["findings"]] == [(kind, 1)]
    assert [row["row"] for row in report["findings"][0]["rows"]] == [place]
    assert report["ok"] == (report["findings"][0]["policy"] == "report")
    assert place in report["text"] and report["train"]["rows"] == 21


@pytest.mark.parametrize("name", [n for n in DEFECTS if DEFECTS[n][0] not in ("too_long",)])
def test_dropping_a_kind_leaves_its_rows_out_and_counts_them(name: str, checked: Callable[..., Report]) -> None:
    kind, line = DEFECTS[name]
    report = checked([*GOOD[:5], line, *GOOD[5:]], f"data.on_fault.{kind}=drop")
    assert report["ok"], report["text"]
    assert report["train"]["examples"] == 20 and report["train"]["dropped"] == {kind: 1}


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_at_fault_is_found(name: str, checked: Callable[..., Report], tmp_path: Path) -> None:
    kind, template = TEMPLATES[name]
    (tmp_path / "t.jinja").write_text(template)
    report = checked(GOOD[:3], f"data.chat_template={tmp_path}/t.jinja")
    assert not report["ok"]
    assert {(f["kind"], f["count"]) for f in report["findings"]} == {(kind, 3), (kind, 1)}  # the one held out too


def test_an_evaluation_row_that_is_trained_on(checked: Callable[..., Report], tmp_path: Path) -> None:
    (tmp_path / "eval.jsonl").write_bytes(chat(("user", "new"), ("assistant", "row")) + b"\n" + GOOD[7] + b"\n")
    report = checked(GOOD)
    assert [(f["kind"], f["side"], f["rows"]) for f in report["findings"]] == [
        ("eval_overlap", "eval", [{"row": f"{tmp_path}/eval.jsonl:2",
                                   "what": f"also in training: {tmp_path}/train.jsonl:8"}])]
    assert not report["ok"]
    report = checked(GOOD, "data.on_fault.eval_overlap=drop")
    assert report["ok"] and report["eval"]["examples"] == 1 and report["train"]["examples"] == 20


def test_every_kind_is_planted_somewhere() -> None:
    planted = {kind for kind, _ in DEFECTS.values()} | {kind for kind, _ in TEMPLATES.values()} | {"eval_overlap"}
    assert planted | {"empty_text"} == set(KINDS)


def test_all_faults_are_told_at_once_and_training_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDWISE_CACHE", str(tmp_path / "cache"))
    lines = [*GOOD[:3], DEFECTS["null"][1], DEFECTS["cut"][1], *GOOD[3:], DEFECTS["null"][1]]
    (tmp_path / "train.jsonl").write_bytes(b"\n".join(lines))
    with pytest.raises(DataError) as caught:
        load_data(settings(tmp_path), TOKENS)
    said = str(caught.value)
    assert all(f"{tmp_path}/train.jsonl:{line}:" in said for line in (4, 5, len(lines)))
    assert "null_content, 2 train rows" in said and "data.on_fault.broken_json=drop" in said


def test_b24_unusable_rows_do_not_touch_the_good_ones(checked: Callable[..., Report]) -> None:
    bad = [DEFECTS[name][1] for name in ("null", "empty", "none", "system only", "assistant first")]
    drop = [f"data.on_fault.{kind}=drop" for kind in ("null_content", "empty_turn", "no_messages", "role_order")]
    report = checked([bad[0], *GOOD[:4], *bad[1:], *GOOD[4:]], *drop)
    assert report["ok"] and report["train"]["examples"] == 20
    assert report["train"]["dropped"] == {"no_messages": 2, "null_content": 1, "empty_turn": 1, "role_order": 1}


def test_a_stream_is_checked_without_a_copy(checked: Callable[..., Report], tmp_path: Path) -> None:
    lines = [*GOOD, DEFECTS["null"][1]]
    stored = checked(lines)
    report = checked(lines, "data.streaming=true", "schedule.max_steps=3")
    assert report["text"] == stored["text"] and report["train"] == stored["train"]
    sizes = [path.stat().st_size for path in (tmp_path / "cache" / "tokenised").glob("*/ids")]
    assert sorted(size == 0 for size in sizes) == [False, False, True]  # the stream's alone is empty
