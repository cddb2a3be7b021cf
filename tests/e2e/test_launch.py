"""launch.sh from the outside: worlds, signals, and nothing left behind."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import pytest

from launched import TINY, finish, launch, mentioning, metrics, start, wait_for
from shardwise.launch.ports import free_port

LONG = ["schedule.max_steps=2000", "checkpoint.every_steps=1000"]


def checkpoints(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").glob("step-*"))


@pytest.mark.parametrize(("processes", "number"), [(1, signal.SIGTERM), (2, signal.SIGUSR1)])
def test_a_signal_stops_with_a_checkpoint_and_three(tmp_path: Path, processes: int,
                                                    number: signal.Signals) -> None:
    folder = tmp_path / "run"
    process = start("./launch.sh", *TINY, *LONG, f"launch.processes={processes}", f"run.output_dir={folder}")
    wait_for(lambda: len(metrics(folder)) >= 2, 90, "two steps")
    process.send_signal(number)
    code, output = finish(process, 60)
    assert code == 3, output[-2000:]
    assert "Start again to go on" in output.splitlines()[-1] and "Traceback" not in output
    assert len(checkpoints(folder)) == 1 and mentioning(str(folder)) == []


def test_a_signal_to_every_process_of_a_step(tmp_path: Path) -> None:
    """What a batch system does: launcher, agent and ranks all get it, and the ranks once more by the launcher."""
    folder = tmp_path / "run"
    process = start("./launch.sh", *TINY, *LONG, "launch.processes=2", f"run.output_dir={folder}")
    wait_for(lambda: len(metrics(folder)) >= 2, 90, "two steps")
    for pid in mentioning(str(folder)):
        os.kill(pid, signal.SIGUSR1)
    code, output = finish(process, 60)
    assert code == 3, output[-2000:]
    assert len(checkpoints(folder)) == 1 and mentioning(str(folder)) == []


def command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:  # it has ended
        return b""


def test_a_signal_while_the_ranks_start(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    process = start("./launch.sh", *TINY, *LONG, f"run.output_dir={folder}")
    # A fork of the shell's names the folder too, so the ranks are told by their module.
    wait_for(lambda: any(b"shardwise.train\0" in command_line(pid) for pid in mentioning(str(folder))), 30, "a rank")
    process.send_signal(signal.SIGTERM)
    code, output = finish(process, 60)
    assert code in (1, 3) and "Traceback" not in output, output[-2000:]
    assert mentioning(str(folder)) == []


def test_the_second_signal_kills(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    process = start("./launch.sh", *TINY, *LONG, f"run.output_dir={folder}", FAULT="hang@0:2")
    wait_for(lambda: len(metrics(folder)) >= 2, 90, "two steps")
    process.send_signal(signal.SIGINT)
    threading.Timer(1, process.send_signal, [signal.SIGINT]).start()
    code, output = finish(process, 30)
    assert code == 1 and "killed at the second signal" in output.splitlines()[-1]
    assert mentioning(str(folder)) == []


@pytest.mark.parametrize("processes", [1, 2])
def test_ranks_stop_when_the_launcher_is_killed(tmp_path: Path, processes: int) -> None:
    folder = tmp_path / "run"
    process = start("./launch.sh", *TINY, *LONG, f"launch.processes={processes}", f"run.output_dir={folder}")
    wait_for(lambda: len(metrics(folder)) >= 2, 90, "two steps")
    process.kill()
    finish(process, 60)
    wait_for(lambda: mentioning(str(folder)) == [], 45, "the last process")
    assert len(checkpoints(folder)) == 1


def test_a_users_accelerate_configuration_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "hf/accelerate").mkdir(parents=True)
    (tmp_path / "hf/accelerate/default_config.yaml").write_text(
        "compute_environment: LOCAL_MACHINE\ndistributed_type: DEEPSPEED\nnum_processes: 4\nnum_machines: 2\n"
        "mixed_precision: fp16\ndebug: true\nuse_cpu: false\ndeepspeed_config: {zero_stage: 3}\n")
    code, output = launch("schedule.max_steps=1", f"run.output_dir={tmp_path / 'run'}",
                          HF_HOME=str(tmp_path / "hf"), WORLD_SIZE="7", RANK="3", ACCELERATE_USE_FSDP="true")
    assert code == 0, output[-2000:]
    assert len(metrics(tmp_path / "run")) == 1


def test_b72_two_nodes_of_one_machine(tmp_path: Path) -> None:
    words = [*TINY, "schedule.max_steps=2", f"run.output_dir={tmp_path / 'run'}", "launch.nodes=2",
             "launch.processes=2", "launch.main_address=127.0.0.1", f"launch.main_port={free_port()}"]
    nodes = [start("./launch.sh", *words, f"launch.node_rank={rank}") for rank in (0, 1)]
    for node in nodes:
        code, output = finish(node)
        assert code == 0, output[-2000:]
    assert len(metrics(tmp_path / "run")) == 2


def test_a_mistake_only_ranks_can_find_ends_with_two(tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text('{"messages": [{"role": "user", "content": "a"}\n')
    code, output = launch(f"data.train=[{tmp_path / 'bad.jsonl'}]", f"run.output_dir={tmp_path / 'run'}",
                          "launch.processes=2")
    assert code == 2 and "Traceback" not in output, output[-2000:]
    assert "bad.jsonl:1: " in output and "data.on_fault.broken_json=drop" in output.splitlines()[-1]
