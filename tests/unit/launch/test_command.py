"""The accelerate command of every node and its environment (B68, B72, B74)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from shardwise.config.load import load
from shardwise.errors import ConfigError
from shardwise.launch import sweep
from shardwise.launch.command import NodeCommand, commands, printed, quoted
from shardwise.launch.nodes import world

TWO = ["launch.nodes=2", "launch.main_address=alpha"]


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "r.yaml"
    path.write_text("model: {path: org/name}\ndata: {train: [a.jsonl]}\n")
    return path


def built(recipe: Path, words: list[str], env: dict[str, str] | None = None, gpus: int = 0) -> list[NodeCommand]:
    loaded = load(recipe, words)
    return commands(loaded, world(loaded, gpus), 4711, str(recipe), words, env or {}, cores=8)


def value(command: NodeCommand, flag: str) -> str:
    return command.argv[command.argv.index(flag) + 1]


def test_b68_several_processes_without_a_gpu_need_multi_gpu(recipe: Path) -> None:
    [command] = built(recipe, ["launch.processes=2"])
    assert "--multi_gpu" in command.argv and "--cpu" not in command.argv
    assert value(command, "--num_processes") == "2"
    assert command.env["SHARDWISE_WORLD_SIZE"] == "2"


def test_one_process_is_started_plainly(recipe: Path) -> None:
    [command] = built(recipe, [])
    assert "--multi_gpu" not in command.argv
    assert command.argv[-3:] == ("--module", "shardwise.train", str(recipe))


def test_b72_one_command_per_node(recipe: Path) -> None:
    first, second = built(recipe, [*TWO, "launch.processes=16"], gpus=8)
    for rank, command in enumerate((first, second)):
        assert value(command, "--machine_rank") == str(rank)
        assert value(command, "--num_processes") == "16" and value(command, "--num_machines") == "2"
        assert value(command, "--main_process_ip") == "alpha" and value(command, "--main_process_port") == "4711"
    assert [a for a, b in zip(first.argv, second.argv, strict=True) if a != b] == ["0"]


@pytest.mark.parametrize(("processes", "given", "threads"), [
    ("1", None, "8"), ("2", None, "4"), ("16", None, "1"), ("2", "3", "3")])
def test_threads_are_a_share_of_the_cores(recipe: Path, processes: str, given: str | None, threads: str) -> None:
    env = {} if given is None else {"OMP_NUM_THREADS": given}
    [command] = built(recipe, [f"launch.processes={processes}"], env)
    assert command.env["OMP_NUM_THREADS"] == threads


def test_another_launchers_variables_are_taken_away(recipe: Path) -> None:
    env = {"RANK": "1", "WORLD_SIZE": "2", "ACCELERATE_USE_FSDP": "true", "MASTER_ADDR": "x", "FRANK": "1",
           "LOCAL_RANK": "1", "TORCHELASTIC_RUN_ID": "x", "HOME": "/"}
    [command] = built(recipe, [], env)
    assert command.unset == ("ACCELERATE_USE_FSDP", "LOCAL_RANK", "MASTER_ADDR", "RANK", "TORCHELASTIC_RUN_ID",
                             "WORLD_SIZE")


AWKWARD = {"SPACES": "a  b ", "QUOTES": "it's \"so\"", "DOLLAR": "$HOME `id` $(id)", "NEWLINE": "one\ntwo\\n'3'",
           "EMPTY": "", "STAR": "* ~ !x", "HASH": "#no", "TAB": "\t", "LETTER": "é"}


def shown(recipe: Path, names: list[str], env: dict[str, str], folder: Path) -> str:
    words = [*TWO, f"launch.forward_env=[{', '.join(names)}]"]
    return printed(built(recipe, words, env)[1], nodes=2, folder=folder)


def test_b74_printed_line_survives_bash(recipe: Path, tmp_path: Path) -> None:
    """The line is run by bash with a program in accelerate's place that reports what reached it."""
    folder = tmp_path / "it's a $folder"
    folder.mkdir()
    text = shown(recipe, [*AWKWARD, "SPACES", "ABSENT"], AWKWARD, folder)
    line = text.splitlines()[-1].strip()
    target = tmp_path / "target.py"
    target.write_text("import json, os, sys\nprint(json.dumps([dict(os.environ), os.getcwd(), sys.argv[1:]]))\n")
    line = line.replace("-m accelerate.commands.launch", quoted(str(target)))
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=True,
                          env={"PATH": "/usr/bin:/bin", "HOME": "/h"})
    env, cwd, argv = json.loads(done.stdout)
    assert {name: env.get(name) for name in AWKWARD} == AWKWARD
    assert "ABSENT" not in env and cwd == str(folder)
    assert argv[-1] == f"launch.forward_env=[{', '.join([*AWKWARD, 'SPACES', 'ABSENT'])}]"


def test_b74_each_name_once_and_unset_ones_left_out(recipe: Path, tmp_path: Path) -> None:
    names = ["NCCL_DEBUG", "NCCL_DEBUG", "ABSENT", "OMP_NUM_THREADS"]
    text = shown(recipe, names, {"NCCL_DEBUG": "INFO", "OMP_NUM_THREADS": "5"}, tmp_path)
    line = text.partition("--module")[0]
    assert line.count("NCCL_DEBUG=INFO") == 1 and line.count("OMP_NUM_THREADS=5") == 1 and "ABSENT" not in line


@pytest.mark.parametrize("name", ["WANDB_API_KEY", "HF_TOKEN", "my_secret", "DB_PASSWORD"])
def test_b74_secrets_are_never_printed(recipe: Path, tmp_path: Path, name: str) -> None:
    text = shown(recipe, [name], {name: "hunter2"}, tmp_path)
    assert "hunter2" not in text and f"{name}=***" in text and f"replace *** in {name}" in text


def test_b74_a_value_in_the_list_is_refused(recipe: Path) -> None:
    with pytest.raises(ConfigError, match="list names only"):
        built(recipe, ["launch.forward_env=[NCCL_DEBUG=INFO]"])


def test_hosts_are_named(recipe: Path, tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("alpha slots=1\nbeta slots=1\n")
    words = ["launch.nodes=2", f"launch.hostfile={tmp_path / 'hosts'}", "launch.processes=2"]
    assert printed(built(recipe, words)[1], nodes=2, folder=tmp_path).startswith("node 1 of 2 (beta):")


def test_the_interpreter_is_this_one(recipe: Path) -> None:
    assert built(recipe, [])[0].argv[0] == sys.executable


@pytest.mark.parametrize(("words", "env", "added"), [
    ([], {"WANDB_SWEEP_ID": "s", "WANDB_RUN_ID": "t"}, ["run.output_dir=runs/r/sweep-s/t"]),
    (["run.name=n"], {"WANDB_SWEEP_ID": "s", "WANDB_RUN_ID": "t"}, ["run.output_dir=runs/n/sweep-s/t"]),
    (["run.output_dir=o"], {"WANDB_SWEEP_ID": "s", "WANDB_RUN_ID": "t"}, []),
    ([], {"WANDB_RUN_ID": "t"}, []), ([], {}, [])])
def test_a_trial_of_a_sweep_has_its_own_folder(recipe: Path, words: list[str], env: dict[str, str],
                                               added: list[str]) -> None:
    assert sweep.overrides(load(recipe, words), env) == added
