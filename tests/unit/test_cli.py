"""The command line: quick, without torch, and plain about mistakes."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shardwise import cli
from shardwise.launch import devices

ROOT = Path(__file__).resolve().parents[2]
TINY = str(ROOT / "recipes/tiny.yaml")


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(devices, "physical_gpus", lambda: 0)
    for name in ("CUDA_VISIBLE_DEVICES", "WANDB_SWEEP_ID", "WANDB_RUN_ID"):
        monkeypatch.delenv(name, raising=False)


def ran(*words: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, env=env, timeout=60)


@pytest.mark.parametrize(("words", "limit"), [(["--help"], 0.3), (["config", TINY], 0.6)])
def test_start_up_time_without_torch(words: list[str], limit: float) -> None:
    seconds = []
    for _ in range(5):
        started = time.perf_counter()
        assert ran("-m", "shardwise", *words).returncode == 0
        seconds.append(time.perf_counter() - started)
        if seconds[-1] < limit:
            break
    assert min(seconds) < limit


@pytest.mark.parametrize("words", [["--help"], ["config", TINY], ["train", TINY, "--dry-run"],
                                   ["train", TINY, "x=1"]])
def test_heavy_libraries_are_not_imported(words: list[str]) -> None:
    code = ("import sys; from shardwise.cli import main; main(sys.argv[1:]); "
            "heavy = {'torch', 'transformers', 'accelerate', 'datasets', 'wandb'} & set(sys.modules); "
            "sys.exit(','.join(heavy) or 0)")
    assert ran("-c", code, *words).returncode == 0


@pytest.mark.parametrize(("words", "code", "said"), [
    ([], 2, "usage: shardwise COMMAND"), (["--help"], 0, "train"), (["--version"], 0, "shardwise 0"),
    (["train", "--help"], 0, "--dry-run"), (["config", TINY, "--help"], 0, "--json")])
def test_help(words: list[str], code: int, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        assert cli.main(words) == code
    except SystemExit as leaving:  # argparse prints its help and leaves
        assert leaving.code == code
    assert said in capsys.readouterr().out


@pytest.mark.parametrize(("words", "said"), [
    (["trian", TINY], "did you mean 'train'"), (["train"], "the recipe comes first"),
    (["train", "--optim.lr", "1e-4", TINY], "'--optim.lr' is no recipe"), (["config", "none.yaml"], "none.yaml"),
    (["config", TINY, "nonsense"], "'nonsense' is not a setting"),
    (["config", TINY, "optim.learing_rate=1"], "did you mean 'optim.lr'"),
    (["config", TINY, "strategy=zero4"], "zero3"), (["config", TINY, "optim.lr=fast"], "optim.lr=fast"),
    (["config", TINY, "offload=params", "launch.processes=2"], "needs strategy=zero3"),
    (["train", TINY, "data.train=[absent.jsonl]"], "absent.jsonl: no such file"),
    (["train", TINY, "model.tokenizer=./absent"], "./absent: no such file"),
    (["train", TINY, "data.train=[demo:nothing]", "--dry-run"], "unknown demo name"),
    (["train", TINY, "launch.nodes=2"], "launch.main_address is not set"),
    (["train", TINY, "launch.hostfile=absent"], "cannot be read")])
def test_mistakes_end_with_two_and_words(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(words) == 2
    out, err = capsys.readouterr()
    assert said in err and "Traceback" not in err and out == ""


def test_all_faults_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["config", TINY, "optim.lr=fast", "strategy=zero4", "optim.x=1"]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 3


def test_b69_more_processes_than_gpus(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(devices, "physical_gpus", lambda: 8)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,3")
    assert cli.main(["train", TINY, "launch.processes=4"]) == 2
    err = capsys.readouterr().err
    assert "launch.processes=4" in err and "2 GPUs are visible" in err


def test_busy_port(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        assert cli.main(["train", TINY, f"launch.main_port={port}"]) == 2
    assert f"launch.main_port={port} is in use" in capsys.readouterr().err


def test_dry_run_prints_the_command_and_the_arithmetic(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", TINY, "--dry-run", "launch.processes=2", "--optim.lr", "1e-3"]) == 0
    *_, command, arithmetic = capsys.readouterr().out.splitlines()
    assert "accelerate.commands.launch" in command and "SHARDWISE_WORLD_SIZE=2" in command
    assert command.endswith(f"shardwise.train {TINY} launch.processes=2 --optim.lr 1e-3")
    assert arithmetic == "16 examples/step = 2 ranks x ~1 micro-batches x <= 1,024 tokens"


def test_dry_run_of_a_sweep_trial_names_its_folder(monkeypatch: pytest.MonkeyPatch,
                                                   capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("WANDB_SWEEP_ID", "s1")
    monkeypatch.setenv("WANDB_RUN_ID", "t1")
    assert cli.main(["train", TINY, "--dry-run"]) == 0
    assert "run.output_dir=runs/tiny/sweep-s1/t1" in capsys.readouterr().out


def test_config_says_where_each_value_came_from(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["config", TINY, "--optim.weight-decay=0.25"]) == 0
    lines = {line.split("#")[0].strip(): line for line in capsys.readouterr().out.splitlines() if "#" in line}
    assert lines["weight_decay: 0.25"].endswith("# command line")
    assert f"# {TINY}:" in lines["lr: 0.003"] and lines["eps: 1e-08"].endswith("# default")


def test_config_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["config", TINY, "--json", "strategy=zero2", "launch.processes=2"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["derived"]["world_size"] == 2 and shown["deepspeed"]["train_batch_size"] == 2
    assert shown["origins"]["strategy"] == "command line"


def test_a_closed_pipe_is_not_an_error_message() -> None:
    line = f"{sys.executable} -m shardwise config {TINY} | head -n 1"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=60,
                          env=os.environ | {"PYTHONPATH": str(ROOT / "src")})
    assert done.stderr == ""
