"""`shardwise data check` and `data show` from the outside: what is printed where, and the exit code."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from launched import ROOT, environment
from shardwise.cli import main

TINY = "recipes/tiny.yaml"
GOOD = json.dumps({"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "héllo <b>"}]})
NULL = json.dumps({"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": None}]})
CUT = '{"messages": [{"role": "us'
EVIL = json.dumps({"messages": [{"role": "\x1b[31mroot\u202e" + "r" * 9999, "content": "x"}]})
SLOW = """
import sys, time
from shardwise.cli import main
from shardwise.data.store import worker
run = worker.run
def slowly(*args, **more):
    time.sleep(2.1)
    return run(*args, **more)
worker.run = slowly
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("commands")
    (path / "good.jsonl").write_text(f"{GOOD}\n", encoding="utf-8")
    (path / "bad.jsonl").write_text("\n".join([GOOD, CUT, NULL, EVIL, ""]), encoding="utf-8")
    return path


def said(folder: Path, *words: str, program: tuple[str, ...] = ("-m", "shardwise"), **env: str) -> tuple[int, str, str]:
    """Exit code, stdout, stderr; never a traceback, and nothing that drives a terminal."""
    done = subprocess.run([sys.executable, *program, *words], cwd=ROOT, capture_output=True, timeout=60,
                          env=environment(SHARDWISE_CACHE=str(folder / "cache"), **env), stdin=subprocess.DEVNULL)
    out, err = done.stdout.decode(), done.stderr.decode()
    assert "Traceback" not in err and "\x1b" not in out, err
    assert all(char.isprintable() or char == "\n" for char in out)
    return done.returncode, out, err


def of(folder: Path, name: str) -> list[str]:
    return [TINY, f"data.train=[{folder / name}]", "data.eval=[]"]


def test_good_data(folder: Path) -> None:
    code, out, err = said(folder, "data", "check", TINY)
    assert code == 0 and err == ""  # too quick for a bar
    assert out.startswith("train: 200 examples of 200 rows, ") and "\neval: 24 examples of 24 rows, " in out
    assert out.endswith("nothing is wrong: training would start\n")


def test_planted_faults_are_named_with_their_lines(folder: Path) -> None:
    code, out, err = said(folder, "data", "check", *of(folder, "bad.jsonl"))
    assert code == 2 and err == ""
    assert out.startswith("train: 1 examples of 4 rows, ")
    assert [line.split(": ")[0].strip() for line in out.splitlines() if "bad.jsonl:" in line] == [
        f"{folder}/bad.jsonl:{line}" for line in (2, 3, 4)]
    assert "null_content, 1 train row (a turn whose content is null or missing)" in out
    assert "way out: mend them, or set data.on_fault.null_content=drop" in out
    assert 'unknown role "\\u001b[31mroot\\u202errr' in out and max(map(len, out.splitlines())) < 500
    assert out.endswith("not fit for training as it is\n")


def test_policies_decide_the_exit_code(folder: Path) -> None:
    drop = [f"data.on_fault.{kind}=drop" for kind in ("broken_json", "null_content", "unknown_role")]
    code, out, _ = said(folder, "data", "check", *of(folder, "bad.jsonl"), *drop)
    assert code == 0 and "\nleft out:\n" in out


def test_json_for_programs(folder: Path) -> None:
    code, out, _ = said(folder, "data", "check", "--json", *of(folder, "bad.jsonl"))
    report = json.loads(out)
    assert code == 2 and list(report) == ["ok", "refused", "train", "eval", "findings"]
    assert (report["ok"], report["refused"], report["eval"]) == (False, None, None)
    side = report["train"]
    assert (side["rows"], side["examples"], side["dropped"]) == (4, 1, {})
    assert {"tokens", "supervised_tokens", "supervised_share", "sources", "length", "share"} <= side.keys()
    assert [(f["side"], f["kind"], f["count"], f["policy"]) for f in report["findings"]] == [
        ("train", kind, 1, "error") for kind in ("broken_json", "null_content", "unknown_role")]
    assert report["findings"][1]["rows"] == [
        {"row": f"{folder}/bad.jsonl:3", "what": "turn 1 (assistant): content is null or missing"}]


def test_a_row_by_its_number_and_by_its_address(folder: Path) -> None:
    code, by_number, err = said(folder, "data", "show", *of(folder, "bad.jsonl"), "--row", "1")
    assert code == 0 and err == ""
    assert f"row: {folder}/bad.jsonl:1\n" in by_number and by_number.endswith(" supervised (40.9%), 1 example\n")
    assert "⟪<|im_end|>⟫⟧" in by_number and "\x1b" not in by_number  # brackets, for it goes into a pipe
    assert said(folder, "data", "show", "--row", f"{folder}/bad.jsonl:1", *of(folder, "bad.jsonl"))[:2] == (
        0, by_number)


def test_a_row_of_the_evaluation(folder: Path) -> None:
    code, out, _ = said(folder, "data", "show", TINY, "--eval", "--row=2")
    assert code == 0 and "row: recipes/tiny/eval.jsonl:2\n" in out


def test_a_row_as_a_page(folder: Path) -> None:
    page = folder / "row.html"
    code, out, _ = said(folder, "data", "show", *of(folder, "good.jsonl"), "--html", str(page))
    assert (code, out) == (0, f"{page} shows {folder}/good.jsonl:1\n")
    text = page.read_text(encoding="utf-8")
    assert text.startswith("<!doctype html>") and "<script" not in text and "&lt;|im_end|&gt;" in text and "é" in text


@pytest.mark.parametrize(("words", "what"), [
    (["--row", "5"], "--row 5: the data has 4 rows, numbered from 1"),
    (["--row", "0"], "--row 0: the data has 4 rows, numbered from 1"),
    (["--row", "²"], "--row ²: give a number, or FILE:LINE as `data check` prints it"),
    (["--row", "x:1"], "--row x:1: no row begins there; the addresses are those `data check` prints"),
    (["--row"], "--row needs a value: --row N"),
    (["--html", "/no/row.html"], "--html /no/row.html: [Errno 2] No such file or directory: '/no/row.html'"),
])
def test_no_such_row(folder: Path, words: list[str], what: str, capsys: pytest.CaptureFixture[str],
                     monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process, for it takes seconds to start one."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("TRANSFORMERS_VERBOSITY", "error")
    assert main(["data", "show", *of(folder, "bad.jsonl"), *words]) == 2
    assert capsys.readouterr() == ("", f"{what}\n")


def test_a_faulty_row_says_why_it_is_none(folder: Path) -> None:
    code, out, err = said(folder, "data", "show", *of(folder, "bad.jsonl"), "--row", "3")
    assert (code, out) == (2, "")
    assert err == (f"{folder}/bad.jsonl:3: not trained on: turn 1 (assistant): content is null or missing\n"
                   "  fault: null_content (a turn whose content is null or missing)\n"
                   f"  the row: {NULL}\n")


@pytest.mark.parametrize(("words", "code", "what"), [
    (["data"], 2, "usage: shardwise data check RECIPE [--json]"),
    (["data", "--help"], 0, "usage: shardwise data check RECIPE [--json]"),
    (["data", "chek", TINY], 2, "shardwise data has no command 'chek'; did you mean 'check'? Commands: check, show"),
    (["data", "check"], 2, "shardwise data check: the recipe comes first, then its settings. "
                           "Try: shardwise data check recipes/demo.yaml"),
    (["data", "check", "--help"], 0, "usage: shardwise data check [-h] [--json] RECIPE"),
    (["data", "show", "--help"], 0, "usage: shardwise data show [-h] [--eval] [--row N] [--html FILE]"),
    (["data", "check", "nosuch.yaml"], 2, "nosuch.yaml: no such recipe file"),
    (["data", "check", TINY, "data.train=[nosuch.jsonl]"], 2,
     "command line: data.train=nosuch.jsonl: no such file or folder"),
])
def test_words_that_are_amiss_or_ask_for_help(folder: Path, words: list[str], code: int, what: str) -> None:
    got, out, err = said(folder, *words)
    assert got == code and (out + err).startswith(what)


def test_a_bar_for_what_takes_long_and_none_in_the_output(folder: Path) -> None:
    code, out, err = said(folder, "data", "check", *of(folder, "good.jsonl"), "--json", program=("-c", SLOW))
    assert code == 0 and json.loads(out)["ok"]
    assert "tokenising: 100%" in err
