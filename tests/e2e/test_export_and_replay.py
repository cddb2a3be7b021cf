"""A run repeated from its manifest, and what its manifest says, through launch.sh and the command line."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

from launched import ROOT, finish, launch, start

KEY, TOKEN = "0123456789abcdef0123456789abcdef01234567", "hf_abcdefghijklmnopqrstuvwxyz"
OTHER = "hf_zyxwvutsrqponmlkjihgfedcba"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four steps of zero2 on two ranks, with secrets in the environment and in an override, on a copy of the data."""
    folder = tmp_path_factory.mktemp("recorded")
    shutil.copy(ROOT / "recipes/tiny/train.jsonl", folder / "train.jsonl")
    code, output = launch(f"run.output_dir={folder / 'run'}", f"data.train=[{folder / 'train.jsonl'}]",
                          "strategy=zero2", "launch.processes=2", "schedule.max_steps=4", f"run.name=named-{OTHER}",
                          WANDB_API_KEY=KEY, HF_TOKEN=TOKEN)
    assert code == 0, output[-3000:]
    return folder / "run"


def replay(run: Path, *words: str) -> tuple[int, str]:
    return finish(start(sys.executable, "-m", "shardwise", "replay", str(run), *words))


def test_no_secret_is_in_any_file_of_the_run(run: Path) -> None:
    texts = [path for path in run.rglob("*") if path.suffix in (".json", ".yaml", ".txt", ".md", ".html", ".jsonl")]
    assert len(texts) > 10
    for path in texts:
        content = path.read_text(encoding="utf-8")
        assert not any(secret in content for secret in (KEY, TOKEN, OTHER)), path
    assert "run.name=named-***" in json.loads((run / "manifest.json").read_text())["command"]


def test_the_manifest_says_what_made_the_run(run: Path) -> None:
    facts = json.loads((run / "manifest.json").read_text())
    source, = facts["data"]["train_sources"]
    assert source["rows"] == 200 and len(source["fingerprint"]) == 32
    assert facts["base"]["path"].startswith("init-") and len(facts["base"]["sha256"]) == 64
    session, = facts["sessions"]
    assert (session["strategy"], session["world_size"], session["from_step"]) == ("zero2", 2, 0)
    assert facts["environment"]["OMP_NUM_THREADS"] == "1" and facts["finished_step"] == 4


@pytest.mark.parametrize(("settings", "largest"), [([], 0.0), (["strategy=ddp", "launch.processes=1"], 1e-5)])
def test_a_replay_finds_the_same_curve(run: Path, settings: list[str], largest: float) -> None:
    before = sorted(path.name for path in run.rglob("*"))
    code, output = replay(run, "--steps", "3", *settings)
    assert code == 0, output[-3000:]
    table = [line.split() for line in output.splitlines() if line.strip()[:1] in "123" and len(line.split()) == 6]
    assert [int(row[0]) for row in table] == [1, 2, 3] and all(float(row[5]) <= largest for row in table)
    assert "the same curve" in output.splitlines()[-1]
    assert sorted(path.name for path in run.rglob("*")) == before


def test_a_curve_that_is_another_one_is_told(run: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(run, other, ignore=shutil.ignore_patterns("checkpoints", "final"))
    facts = json.loads((other / "manifest.json").read_text())
    facts["config"]["optim"]["lr"] *= 1.01
    (other / "manifest.json").write_text(json.dumps(facts))
    code, output = replay(other, "--steps", "2")
    assert code == 1 and "NOT the same curve" in output and "of step 2)" in output  # step 1 knows no rate yet


def test_other_data_is_refused_before_a_model_is_loaded(run: Path) -> None:
    data = run.parent / "train.jsonl"
    lines = data.read_text().splitlines(keepends=True)
    try:
        data.write_text("".join(lines[:-1]))
        code, output = replay(run)
    finally:
        data.write_text("".join(lines))
    assert code == 2 and f"{data} has other rows" in output and "199 rows" in output and "parameters" not in output
