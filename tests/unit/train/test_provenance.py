"""manifest.json over several starts of a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shardwise.errors import UserError
from shardwise.train import provenance


def facts(started: str, **more: Any) -> dict[str, Any]:
    common = dict.fromkeys(provenance.PER_START, started)
    return common | {"identity": {"strategy": "ddp", "offload": "none", "world_size": 2, "curve": {}},
                     "config": {"strategy": "auto", "checkpoint": {"keep": 2}}} | more


def written(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "manifest.json").read_text())


def test_a_resume_adds_to_what_the_first_start_said(tmp_path: Path) -> None:
    provenance.record_start(tmp_path, facts("monday"), from_step=0)
    later = facts("tuesday", config={"strategy": "zero2", "checkpoint": {"keep": 5}})
    later["identity"] = later["identity"] | {"strategy": "zero2", "world_size": 4}
    provenance.record_start(tmp_path, later, from_step=30)
    provenance.record_end(tmp_path, 60)
    found = written(tmp_path)
    assert found["started"] == "monday" and found["identity"]["strategy"] == "ddp" and found["finished_step"] == 60
    assert [(one["started"], one["command"], one["strategy"], one["world_size"], one["from_step"])
            for one in found["sessions"]] == [("monday", "monday", "ddp", 2, 0), ("tuesday", "tuesday", "zero2", 4, 30)]
    assert found["sessions"][1]["changed"] == {"strategy": ["auto", "zero2"], "checkpoint.keep": [2, 5]}


def test_a_start_from_nothing_is_the_first_one_and_keeps_the_history(tmp_path: Path) -> None:
    for day in ("monday", "tuesday"):  # killed before its first checkpoint, and started again
        provenance.record_start(tmp_path, facts(day), from_step=0)
    assert written(tmp_path)["started"] == "tuesday"
    assert [one["started"] for one in written(tmp_path)["sessions"]] == ["monday", "tuesday"]


def test_a_manifest_that_cannot_be_read_is_not_written_over(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text('{"started":')
    with pytest.raises(UserError, match=r"manifest.json: cannot be read"):
        provenance.record_start(tmp_path, facts("monday"), from_step=0)
    assert (tmp_path / "manifest.json").read_text() == '{"started":'


def test_the_environment_is_chosen_by_name_and_without_secrets() -> None:
    env = {"CUDA_VISIBLE_DEVICES": "0,1", "NCCL_DEBUG": "INFO", "HF_TOKEN": "hf_x", "HF_HOME": "/h", "PATH": "/bin",
           "WANDB_API_KEY": "k", "WANDB_MODE": "offline", "TORCH_SECRET": "s", "SLURM_JOB_ID": "7",
           "TRANSFORMERS_API_TOKEN": "t", "TORCHELASTIC_RUN_ID": "none", "OMP_NUM_THREADS": "1"}
    assert provenance.environment(env) == {
        "CUDA_VISIBLE_DEVICES": "0,1", "HF_HOME": "/h", "NCCL_DEBUG": "INFO", "OMP_NUM_THREADS": "1",
        "SLURM_JOB_ID": "7", "WANDB_MODE": "offline"}


def test_hardware_is_described() -> None:
    found = provenance.hardware()
    assert found["cores"] >= 1 and found["memory_gib"] > 0 and found["cpu"]
    assert set(found) == {"machine", "system", "cpu", "cores", "memory_gib", "gpus", "cuda", "driver", "nccl"}
