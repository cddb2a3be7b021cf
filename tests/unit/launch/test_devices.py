"""Visible GPUs from the environment (B69); no GPU is needed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from shardwise.errors import PreflightError
from shardwise.launch.devices import physical_gpus, visible_gpus


@pytest.mark.parametrize(("listed", "physical", "count"), [
    (None, 8, 8), (None, 0, 0), (None, None, 0),
    ("", 8, 0), ("-1", 8, 0), ("3", 8, 1), ("3", None, 1), ("0,2", 4, 2), (" 0, 1 ", 2, 2), ("1,-1,0", 4, 1),
    ("GPU-8a-1,GPU-8a-2", 2, 2), ("MIG-7c", 1, 1), ("", 0, 0)])
def test_b69_visible_not_physical(listed: str | None, physical: int | None, count: int) -> None:
    env = {} if listed is None else {"CUDA_VISIBLE_DEVICES": listed}
    assert visible_gpus(env, physical) == count


@pytest.mark.parametrize(("listed", "physical", "words"), [
    ("0,0", 2, ["0,0", "twice"]), ("4", 2, ["names GPU 4", "2 GPUs", "0 to 1"]), ("0", 0, ["no GPU", "unset"]),
    ("first", 2, ["'first'"]), ("0,", 2, ["''"]), ("1,1.5", 2, ["'1.5'"])])
def test_b69_refused(listed: str, physical: int, words: list[str]) -> None:
    with pytest.raises(PreflightError) as caught:
        visible_gpus({"CUDA_VISIBLE_DEVICES": listed}, physical)
    assert all(word in str(caught.value) for word in [*words, "CUDA_VISIBLE_DEVICES"])
    assert caught.value.exit_code == 2


def test_counted_by_nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'GPU 0: H (UUID: GPU-1)'\necho '  MIG 1g (UUID: M)'\necho 'GPU 1: H'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert physical_gpus(tmp_path / "none") == 2


def test_counted_by_the_driver_without_the_tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert physical_gpus(tmp_path / "none") == 0
    for name in ("0000:01:00.0", "0000:02:00.0"):
        (tmp_path / "gpus" / name).mkdir(parents=True)
    assert physical_gpus(tmp_path / "gpus") == 2


def test_a_tool_without_its_driver_counts_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'cannot communicate with the driver'\nexit 9\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert physical_gpus(tmp_path / "none") == 0
