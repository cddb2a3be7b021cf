"""Tokenising a source: once, in any number of processes, going on where a killed one left off."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from launched import wait_for
from shardwise.data.read.files import DataFile
from shardwise.data.read.readers import plan
from shardwise.data.store import build, worker
from shardwise.errors import DataError, PreflightError
from tokenised import begin, ended, folder_of, living, opened, row, small_units, write_rows

ROWS = 60
SMALL = 1000
"""Bytes of a piece: 8 to 10 rows."""


def written(file: Path) -> list[str]:
    return file.read_text().splitlines() if file.exists() else []


def contents(cache_root: Path) -> dict[str, Any]:
    """All that a complete cache folder holds, comparable with ==."""
    folder = folder_of(cache_root)
    with np.load(folder / "index.npz") as index:
        columns = {name: (column.dtype.str, column.tolist()) for name, column in index.items()}
    assert sorted(path.name for path in folder.iterdir()) == ["facts.json", "ids", "index.npz", "weights"]
    return {**columns, "ids": (folder / "ids").read_bytes(), "weights": (folder / "weights").read_bytes(),
            "facts": (folder / "facts.json").read_text()}


def mixed_rows(path: Path) -> Path:
    """Good rows, three kinds of faulty ones, blank lines, and a piece that has nothing but faults."""
    lines = [json.dumps(row(number)) for number in range(ROWS)]
    lines[3] = "{"
    lines[9] = ""
    lines[20:32] = ['{"messages": []}'] * 12
    lines[45] = json.dumps({"messages": row(45)["messages"] + [{"role": "nobody", "content": "x"}]})
    weighted = row(50)
    weighted["messages"][1]["weight"] = 0.5
    lines[50] = json.dumps(weighted)
    path.write_text("\n".join(lines))
    return path


@pytest.mark.parametrize("workers", [2, "auto"])
def test_parallel_equals_serial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int | str) -> None:
    path = mixed_rows(tmp_path / "a.jsonl")
    monkeypatch.setenv("SHARDWISE_CACHE", str(tmp_path / "whole"))
    source = opened(path, workers=1)
    small_units(monkeypatch, SMALL)
    monkeypatch.setattr(build, "BYTES_PER_WORKER", 1)
    monkeypatch.setenv("SHARDWISE_CACHE", str(tmp_path / "cut"))
    opened(path, workers=workers)
    assert contents(tmp_path / "cut") == contents(tmp_path / "whole")

    assert source.facts["counts"] == {"broken_json": 1, "no_messages": 12, "unknown_role": 1}
    assert source.facts["rows"] == ROWS - 1  # a blank line is none
    assert [fault["place"] for fault in source.facts["faults"]] == [
        f"{path}:{line}" for line in (4, *range(21, 33), 46)]
    good = [n for n in range(ROWS) if n not in (3, 9, 45, *range(20, 32))]
    assert source.index["line"].tolist() == [n + 1 for n in good]
    assert source.weights.dtype == np.float32 and set(source.weights.tolist()) == {0.0, 0.5, 1.0}


def test_of_very_many_faults_the_first_of_each_kind_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_units(monkeypatch, 100)
    monkeypatch.setattr(worker, "FAULTS_KEPT", 3)
    monkeypatch.setenv("SHARDWISE_CACHE", str(tmp_path / "cache"))
    (tmp_path / "a.jsonl").write_text(('{"messages": []}\n' * 9 + "{\n") * 4)
    facts = opened(tmp_path / "a.jsonl").facts
    assert facts["counts"] == {"no_messages": 36, "broken_json": 4}
    lines = [(fault["kind"], int(fault["place"].rpartition(":")[2])) for fault in facts["faults"]]
    assert sorted(lines) == [("broken_json", n) for n in (10, 20, 30)] + [("no_messages", n) for n in (1, 2, 3)]


def test_the_units_really_are_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_units(monkeypatch, SMALL)
    path = write_rows(tmp_path / "a.jsonl", ROWS)
    assert len(plan(DataFile(path, "a", "jsonl", False))) == 7


def test_b54_two_processes_and_a_cold_cache(tmp_path: Path) -> None:
    path, log = write_rows(tmp_path / "a.jsonl", 20), tmp_path / "log"
    both = [begin(path, tmp_path / "cache", log, slow=0.02) for _ in range(2)]
    first, second = (ended(process) for process in both)
    assert first == second and first["rows"] == first["examples"] == 20
    assert sorted(written(log)) == sorted(f"row {n}" for n in range(20))  # each once, not twice
    assert ended(begin(path, tmp_path / "cache", log)) == first
    assert len(written(log)) == 20  # none when warm


def test_a_killed_build_goes_on_where_it_was(tmp_path: Path) -> None:
    """kill -9 of the process that has the lock: its workers follow, and what they had finished is not done again."""
    path, log, cache = write_rows(tmp_path / "a.jsonl", ROWS), tmp_path / "log", tmp_path / "cache"
    process = begin(path, cache, log, workers=2, size=SMALL, slow=0.1)
    wait_for(lambda: len(list(cache.glob("tokenised/*.part/[0-9].npz"))) >= 2, 60, "two finished pieces")
    process.kill()
    process.communicate()
    wait_for(lambda: not living(log), 5, "the last worker's end")
    assert not list(cache.glob("tokenised/*/facts.json")), "it was killed too late"
    done = set()
    for index in cache.glob("tokenised/*.part/[0-9].npz"):
        with np.load(index) as columns:
            done |= {f"row {line - 1}" for line in columns["line"]}
    before = written(log)
    assert 8 <= len(done) < ROWS and done <= set(before)

    result = ended(begin(path, cache, log, workers=1, size=SMALL))
    assert Counter(written(log)[len(before):]) == Counter({f"row {n}" for n in range(ROWS)} - done)
    assert result == ended(begin(path, tmp_path / "other", tmp_path / "log2", size=SMALL))
    assert contents(cache) == contents(tmp_path / "other")
    assert sorted(p.suffix for p in (cache / "tokenised").iterdir()) == ["", ".lock"]  # nothing in pieces is left


def test_a_killed_worker_is_an_error_and_not_a_hang(tmp_path: Path) -> None:
    path, log, cache = write_rows(tmp_path / "a.jsonl", ROWS), tmp_path / "log", tmp_path / "cache"
    result = ended(begin(path, cache, log, workers=2, size=SMALL, die="row 40"))
    assert result["error"] == "DataError" and "a tokenising process died (out of memory" in result["text"]
    assert "data.workers=1" in result["text"] and not list(cache.glob("tokenised/*/facts.json"))
    wait_for(lambda: not living(log), 5, "the other worker's end")
    assert ended(begin(path, cache, log, size=SMALL))["examples"] == ROWS


def test_ctrl_c_ends_it_all(tmp_path: Path) -> None:
    path, log = write_rows(tmp_path / "a.jsonl", ROWS), tmp_path / "log"
    process = begin(path, tmp_path / "cache", log, workers=2, size=SMALL, slow=0.05)
    wait_for(lambda: written(log), 60, "the first row")
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=20)  # one piece is finished first
    wait_for(lambda: not living(log), 5, "the last worker's end")


def test_a_batch_systems_warning_to_every_process_ends_no_worker(tmp_path: Path) -> None:
    """The run itself stops after its first step; until then its workers must do theirs."""
    path, log = write_rows(tmp_path / "a.jsonl", ROWS), tmp_path / "log"
    process = begin(path, tmp_path / "cache", log, workers=2, size=SMALL, slow=0.05)
    wait_for(lambda: written(log), 60, "the first row")
    for pid in set(workers_of(process.pid)):
        os.kill(pid, signal.SIGUSR1)
    assert ended(process)["examples"] == ROWS and len(written(log)) == ROWS


def workers_of(parent: int) -> list[int]:
    """Its children that tokenise."""
    found = []
    for child in Path(f"/proc/{parent}/task/{parent}/children").read_text().split():
        if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes():
            found.append(int(child))
    return found


@pytest.mark.parametrize("most_bytes", [500, 1500, 3000])
def test_a_full_disk_is_said_in_words(tmp_path: Path, most_bytes: int) -> None:
    """No file may be larger: a piece's tokens do not fit, or its index, or only the whole."""
    path, log, cache = write_rows(tmp_path / "a.jsonl", ROWS), tmp_path / "log", tmp_path / "cache"
    result = ended(begin(path, cache, log, size=SMALL, most_bytes=most_bytes))
    assert result["error"] == "PreflightError" and "SHARDWISE_CACHE" in result["text"]
    assert "File too large" in result["text"] and str(cache) in result["text"]
    assert not list(cache.glob("tokenised/*/facts.json"))
    if most_bytes == 3000:
        assert ended(begin(path, cache, log, size=SMALL))["examples"] == ROWS
        assert len(written(log)) == ROWS  # only joining had failed


def test_the_last_bytes_count_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a full disk refuses only when a file is closed; ndarray.tofile says nothing then."""
    if not os.path.exists("/dev/full"):
        pytest.skip("no /dev/full here")
    with pytest.raises(PreflightError, match="No space left on device"), worker.writing(tmp_path):
        worker.write(Path("/dev/full"), np.arange(3))


def test_an_unwritable_cache_is_said_in_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("SHARDWISE_CACHE", str(tmp_path / "file"))
    with pytest.raises(PreflightError, match="Not a directory.*SHARDWISE_CACHE"):
        opened(write_rows(tmp_path / "a.jsonl", 3))


def test_without_a_row_there_is_no_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "empty.jsonl").write_text("\n\n")
    monkeypatch.setenv("SHARDWISE_CACHE", str(tmp_path / "cache"))
    for _ in range(2):  # cold and warm
        with pytest.raises(DataError, match="empty.jsonl: 0 rows"):
            opened(tmp_path / "empty.jsonl")
