"""One live run per folder. The kernel's locks are between processes, so the other holder is one."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardwise import lock
from shardwise.errors import EXIT_USER, PreflightError
from shardwise.lock import RunLock, held, refuse_if_held

HOLD = """
import sys, time
from pathlib import Path
from shardwise.lock import held
with held(Path(sys.argv[1]), main=True, job="theirs"):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(lock, "PATIENCE_SECONDS", 0.2)
    return tmp_path / "run"


@pytest.fixture
def holder(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds the folder."""
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(folder)], text=True, stdin=subprocess.PIPE,
                               stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.communicate()


def test_a_live_holder_is_named_to_all(folder: Path, holder: subprocess.Popen[str]) -> None:
    for main in (True, False):
        with pytest.raises(PreflightError) as refused, held(folder, main=main, job="ours"):
            pass
        assert f"{folder}: a live run holds this folder: host {socket.gethostname()}, pid {holder.pid}, since " in str(
            refused.value)
        assert refused.value.exit_code == EXIT_USER
    assert json.loads((folder / ".lock").read_text())["pid"] == holder.pid  # as it was


def test_the_other_ranks_of_the_holders_job_pass(folder: Path, holder: subprocess.Popen[str]) -> None:
    with held(folder, main=False, job="theirs"):
        pass


def test_a_killed_holder_is_not_in_the_way(folder: Path, holder: subprocess.Popen[str]) -> None:
    holder.kill()
    holder.wait()
    assert (folder / ".lock").is_file()
    refuse_if_held(folder, "ours")
    with held(folder, main=True, job="ours"):
        assert json.loads((folder / ".lock").read_text())["pid"] == os.getpid()


def test_a_forked_child_does_not_keep_it(folder: Path) -> None:
    """Data workers may outlive their parent for a moment."""
    code = HOLD.replace('    print', '    import os\n    if os.fork() == 0:\n        time.sleep(30)\n    print')
    process = subprocess.Popen([sys.executable, "-c", code, str(folder)], text=True, stdin=subprocess.PIPE,
                               stdout=subprocess.PIPE, start_new_session=True)
    try:
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        process.kill()
        process.wait()
        refuse_if_held(folder, "ours")
    finally:
        os.killpg(process.pid, 9)
        process.communicate()


def test_nothing_is_left_behind(folder: Path) -> None:
    with held(folder, main=True, job="ours"):
        assert (folder / ".lock").is_file()
    assert not folder.exists()  # it was made for nothing
    folder.mkdir()
    (folder / "metrics.jsonl").touch()
    with held(folder, main=True, job="ours"):
        pass
    assert [path.name for path in folder.iterdir()] == ["metrics.jsonl"]


def test_looking_makes_no_folder(folder: Path) -> None:
    refuse_if_held(folder, "ours")
    assert not folder.exists()


def left_by(folder: Path, *, host: str, job: str = "theirs", pid: int = 4711, age: float = 0.0) -> Path:
    """A lock file nobody holds, as the kernel sees it."""
    folder.mkdir()
    path = folder / ".lock"
    path.write_text(json.dumps({"host": host, "pid": pid, "job": job, "since": "then"}))
    os.utime(path, (time.time() - age, time.time() - age))
    return path


def test_another_host_that_still_touches_it_is_refused(folder: Path) -> None:
    path = left_by(folder, host="elsewhere", age=30)
    threading.Timer(0.7, os.utime, [path]).start()
    with pytest.raises(PreflightError, match="host elsewhere, pid 4711, since then"):
        RunLock(folder, "ours")


def test_another_host_that_is_long_silent_is_gone(folder: Path) -> None:
    left_by(folder, host="elsewhere", age=lock.STALE_SECONDS + 1)
    RunLock(folder, "ours").release()


def test_another_host_is_given_the_rest_of_its_time(folder: Path) -> None:
    left_by(folder, host="elsewhere", age=lock.STALE_SECONDS - 1)
    began = time.monotonic()
    RunLock(folder, "ours").release()
    assert time.monotonic() - began > 0.9


def test_the_same_job_on_another_host_takes_it_over(folder: Path) -> None:
    """Queued again by Slurm, or restarted by torchrun with the ranks dealt out anew."""
    left_by(folder, host="elsewhere", job="ours")
    RunLock(folder, "ours").release()


@pytest.mark.parametrize(("pid", "refused"), [(os.getpid(), True), (2 ** 22 + 1, False)], ids=["alive", "dead"])
def test_where_the_kernel_has_no_locks_the_pid_decides(folder: Path, monkeypatch: pytest.MonkeyPatch, pid: int,
                                                      refused: bool) -> None:
    monkeypatch.setattr(lock, "_lock", lambda handle: None)
    left_by(folder, host=socket.gethostname(), pid=pid)
    if refused:
        with pytest.raises(PreflightError, match=f"pid {pid}"):
            RunLock(folder, "ours")
    else:
        RunLock(folder, "ours").release()


def test_a_file_that_names_nobody_holds_nothing(folder: Path) -> None:
    left_by(folder, host="elsewhere").write_text("{")
    RunLock(folder, "ours").release()


def test_touching(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock.touch()  # nothing is held
    monkeypatch.setattr(lock, "TOUCH_SECONDS", 0.0)
    with held(folder, main=True, job="ours"):
        os.utime(folder / ".lock", (1.0, 1.0))
        lock.touch()
        assert time.time() - (folder / ".lock").stat().st_mtime < 60


@pytest.mark.parametrize(("env", "job"), [
    ({"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "MASTER_PORT": "1"}, "slurm 7.0"),
    ({"TORCHELASTIC_RUN_ID": "b73", "MASTER_ADDR": "a", "MASTER_PORT": "1"}, "torchrun b73"),
    ({"TORCHELASTIC_RUN_ID": "none", "MASTER_ADDR": "a", "MASTER_PORT": "1"}, "at a:1"),
    ({lock.JOB: "x", "SLURM_JOB_ID": "7"}, "x")])
def test_what_ranks_of_one_job_have_in_common(env: dict[str, str], job: str) -> None:
    assert lock.job_of(env) == job


def test_a_process_of_its_own_is_a_job_of_its_own() -> None:
    assert lock.job_of({}) != lock.job_of({})
    assert lock.job_of({}, "alpha:29500") == lock.job_of({}, "alpha:29500") == "at alpha:29500"


def test_a_folder_that_cannot_be_written_to_is_the_users_mistake(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(PreflightError, match=r"file/run: the run folder cannot be written to \(Not a directory\)"), \
            held(tmp_path / "file" / "run", main=True, job="ours"):
        pass
