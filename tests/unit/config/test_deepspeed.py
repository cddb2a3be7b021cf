"""One DeepSpeed dict, each number with one owner (B11, B12)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shardwise.config.deepspeed import AUTO, deepspeed_dict, zero_file
from shardwise.errors import ConfigError

SHIPPED = sorted((Path(__file__).parents[3] / "ds_configs").glob("*.json"))


def made(path: Path, **more: Any) -> dict[str, Any]:
    given: dict[str, Any] = {"strategy": "zero2", "offload": "none", "precision": "bf16", "optimizer": "adamw",
                             "max_grad_norm": 1.0, "world_size": 2}
    return deepspeed_dict(path, **given | more)


def written(tmp_path: Path, content: object) -> Path:
    path = tmp_path / "ds.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_b12_no_auto_is_left(path: Path) -> None:
    strategy, _, offload = path.stem.partition("_")
    resolved = made(path, strategy=strategy, offload="params" if offload else "none")
    assert '"auto"' not in json.dumps(resolved)


def test_b12_auto_numbers_are_the_recipes(tmp_path: Path) -> None:
    everything = {"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto",
                  "gradient_clipping": "auto",
                  "gradient_accumulation_steps": "auto", "bf16": {"enabled": "auto"},
                  "zero_optimization": dict.fromkeys(AUTO, "auto") | {"stage": 2}}
    resolved = made(written(tmp_path, everything), max_grad_norm=0.5, world_size=4)
    assert resolved["gradient_clipping"] == 0.5
    assert resolved["bf16"] == {"enabled": True, "check_grad_overflow": True} and not resolved["fp16"]["enabled"]
    # Accumulation is driven window by window, so to DeepSpeed each micro-batch is one of one.
    assert (resolved["gradient_accumulation_steps"], resolved["train_micro_batch_size_per_gpu"],
            resolved["train_batch_size"]) == (1, 1, 4)
    assert resolved["zero_optimization"] == {**AUTO, "stage": 2}


@pytest.mark.parametrize(("content", "said"), [
    ({"gradient_accumulation_steps": "4"}, 'gradient_accumulation_steps="4" is decided by the recipe'),
    ({"gradient_accumulation_steps": 4}, "batch.examples_per_step"),
    ({"train_batch_size": 8}, "train_batch_size=8"),
    ({"gradient_clipping": 0.3}, "gradient_clipping=0.3"), ({"fp16": {"enabled": True}}, "fp16"),
    ({"optimizer": {"type": "Adam"}}, "optimizer"), ({"scheduler": {"type": "WarmupLR"}}, "scheduler"),
    ({"zero_optimization": {"reduce_bucket_size": "5e8"}}, 'reduce_bucket_size="5e8" is text'),
    ({"zero_optimization": {"overlap_comm": "true"}}, 'overlap_comm="true" must be true or false'),
    ({"zero_optimization": {"overlap_comm": 1}}, "overlap_comm=1 must be true or false"),
    ({"zero_optimization": {"stage": 3}}, "stage=3 contradicts strategy=zero2"),
    ({"zero_optimization": {"sub_group_size": "auto"}}, 'sub_group_size="auto" has no meaning'),
    ({"zero_optimization": {"offload_optimizer": {"device": "cpu"}}},
     "offload_optimizer contradicts offload=none"),
    ({"zero_optimization": {"offload_optimizer": {"device": "nvme"}}}, "only cpu is supported"),
    ({"zero_optimization": 3}, "a JSON object"), ([], "a JSON object"), ('{"a": 1,\n}', ":2: not valid JSON")])
def test_b11_refused_before_launch(tmp_path: Path, content: object, said: str) -> None:
    path = written(tmp_path, content)
    with pytest.raises(ConfigError) as caught:
        made(path)
    assert said in str(caught.value) and str(path) in str(caught.value)


def test_b11_a_bucket_size_written_as_float_becomes_whole(tmp_path: Path) -> None:
    size = made(written(tmp_path, '{"zero_optimization": {"reduce_bucket_size": 5e8}}'))["zero_optimization"]
    assert size["reduce_bucket_size"] == 500_000_000 and isinstance(size["reduce_bucket_size"], int)


def test_agreement_is_no_contradiction(tmp_path: Path) -> None:
    assert made(written(tmp_path, {"gradient_clipping": 1.0}))["gradient_clipping"] == 1.0


def test_no_clipping_is_zero(tmp_path: Path) -> None:
    assert made(written(tmp_path, {}), max_grad_norm=None)["gradient_clipping"] == 0.0


def test_fp16_has_a_fixed_scale_for_ours_to_take_its_place() -> None:
    resolved = made(zero_file("zero2", "none"), precision="fp16")
    assert resolved["fp16"] == {"enabled": True, "loss_scale": 1.0} and not resolved["bf16"]["enabled"]


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such DeepSpeed configuration"):
        made(tmp_path / "none.json")


@pytest.mark.parametrize(("offload", "optimizer", "params", "ours"), [
    ("none", False, False, False), ("optimizer", True, False, True), ("params", True, True, True)])
def test_offload_follows_the_recipe(offload: str, optimizer: bool, params: bool, ours: bool) -> None:
    resolved = made(zero_file("zero3", offload), strategy="zero3", offload=offload)
    zero = resolved["zero_optimization"]
    assert ("offload_optimizer" in zero, "offload_param" in zero) == (optimizer, params)
    assert resolved["zero_force_ds_cpu_optimizer"] is ours


def test_sgd_on_the_host_is_torchs() -> None:
    resolved = made(zero_file("zero2", "optimizer"), offload="optimizer", optimizer="sgd")
    assert resolved["zero_force_ds_cpu_optimizer"] is False
