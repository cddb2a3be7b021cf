"""Early stopping and the best checkpoint are decided once, for all ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from dist.harness import spawn

COMMON = ["batch.examples_per_step=6", "batch.max_tokens_per_micro_batch=400", "data.max_length=400",
          "schedule.max_steps=9", "eval.every_steps=1", "eval.patience=2", "checkpoint.keep=1",
          "checkpoint.keep_best=1", "eval.final=best"]
RANK_0 = [9.0, 3.0, 2.0, 2.5, 2.5, 1.0]
"""Before training and after each step: the second is the best, and two without a better one end it after step 4."""
RANK_1 = [9.0, 3.0, 2.0, 1.5, 1.0, 0.5]
"""What rank 1 would say: by its numbers training would go on."""


@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_b51_both_leave_at_the_same_step(tmp_path: Path, strategy: str) -> None:
    found = spawn("dist.bodies_resume:scored", world_size=2, folder=tmp_path, timeout_s=90, args={
        "overrides": [*COMMON, f"strategy={strategy}"], "losses": [RANK_0, RANK_1]})
    run = tmp_path / "run"
    for rank in found:
        assert rank["steps"] == [4, 4]  # the second start finds it finished
        assert rank["again"] == "nothing to do"
    kept = sorted(path.name for path in (run / "checkpoints").iterdir())
    assert kept == ["step-00000002", "step-00000004"]
    losses = {name: json.loads((run / "checkpoints" / name / "meta.json").read_text())["eval_loss"] for name in kept}
    assert losses == {"step-00000002": 2.0, "step-00000004": 2.5}
    # final/ has the weights of step 2, not those of step 4.
    final = load_file(run / "final" / "model.safetensors")
    shapes = json.loads((run / "checkpoints" / kept[0] / "meta.json").read_text())["shapes"]
    from shardwise.checkpoint.slices import Saved, Slice

    for name, equal in ((kept[0], True), (kept[1], False)):
        whole = {f"weight/{key}": torch.zeros(final[key].numel()) for key in shapes}
        Saved(run / "checkpoints" / name / "state").read(
            {key: Slice(tensor, tensor.numel(), 0) for key, tensor in whole.items()})
        assert all(torch.equal(whole[f"weight/{key}"], final[key].flatten()) for key in shapes) == equal
