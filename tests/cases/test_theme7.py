"""cases.md, theme 7: memory and offload."""

from __future__ import annotations

import math
from pathlib import Path

from dist.harness import spawn
from launched import launch


def test_b48_a_compiler_that_does_not_work_is_told_before_a_model_loads(tmp_path: Path) -> None:
    code, output = launch("strategy=zero2", "offload=optimizer", f"run.output_dir={tmp_path}/run", CXX="/bin/false",
                          TORCH_EXTENSIONS_DIR=str(tmp_path / "extensions"))
    assert code == 2, output[-3000:]
    last = output.strip().splitlines()[-1]
    assert "could not be compiled: " in last and "/bin/false" in last and "apt-get install g++ ninja-build" in last
    assert "ds_opt_adam" not in output and "Loading weights" not in output


def test_b49_under_zero3_each_rank_loads_its_part(tmp_path: Path) -> None:
    for rank in spawn("dist.bodies_resume:loaded", world_size=2, args={}, folder=tmp_path, timeout_s=60):
        sizes = [math.prod(shape) for shape in rank["shapes"].values()]
        assert rank["held"] == sum(math.ceil(size / 2) for size in sizes) and sum(sizes) > 100_000
        assert set(rank["whole"].values()) == {0}
        assert rank["unequal"] == [] and rank["compared"] == len(sizes)
