"""cases.md, theme 2: no_sync, ZeRO, accumulation and 'auto'. (B09 is in dist/test_communication.py, B11 in
unit/config/test_deepspeed.py.)"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from dist import reference
from dist.given import TINY, save_model, tiny_row, write_chats, write_recipe
from dist.harness import spawn
from dist.reference import Settings
from shardwise.config.launcher import Launcher, from_environment
from shardwise.config.load import load
from shardwise.config.resolve import resolve
from shardwise.errors import ConfigError

STRATEGIES = ("ddp", "zero1", "zero2", "zero3")
# 8 rows by 4 on two ranks, one row a micro-batch: two optimizer steps of two micro-batches per rank.
ROWS = [tiny_row(6, 1 + n % 5, n) for n in range(8)]
SPLIT = ["batch.examples_per_step=4", "batch.max_tokens_per_micro_batch=6", "data.packing=false"]
DESCENT = ["optim.name=sgd", "optim.lr=0.1", "optim.max_grad_norm=0.7", "schedule.kind=constant"]
SETTINGS = Settings(examples_per_step=4, epochs=1, optimizer="sgd", lr=0.1, weight_decay=0.0, max_grad_norm=0.7,
                    kind="constant")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("theme2")
    model = save_model(path / "tiny", "llama", **TINY)
    write_recipe(path / "recipe.yaml", model, write_chats(path / "unused.jsonl", []))
    return path


@pytest.fixture(scope="module")
def ran(folder: Path) -> list[dict[str, Any]]:
    runs = {strategy: {"rows": ROWS, "overrides": [*SPLIT, *DESCENT, f"strategy={strategy}"]}
            for strategy in STRATEGIES}
    runs |= {f"{strategy}-bf16": {"rows": ROWS, "overrides": [*SPLIT, *DESCENT, f"strategy={strategy}",
                                                              "precision=bf16"]} for strategy in ("ddp", "zero1")}
    return spawn("dist.plain:train_rows", world_size=2, folder=folder / "out", timeout_s=90,
                 args={"recipe": str(folder / "recipe.yaml"), "runs": runs})


@pytest.fixture(scope="module")
def want(folder: Path) -> reference.Result:
    return reference.train(folder / "tiny", ROWS, SETTINGS)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_b08_accumulation_under_every_strategy(strategy: str, ran: list[dict[str, Any]], folder: Path,
                                               want: reference.Result) -> None:
    got = ran[0][strategy]
    assert got["micro_batches"] == [2, 2]
    assert got["engine_steps"] == (None if strategy == "ddp" else 2)
    assert got["no_sync"] == (2 if strategy == "ddp" else 0)  # ddp: all but the last micro-batch of each step
    weights = load_file(folder / "out" / f"{strategy}.safetensors")
    for name, value in want.weights.items():
        assert weights[name] == pytest.approx(value, abs=1e-6), name


@pytest.mark.parametrize("strategy", STRATEGIES[1:])
def test_b12_nothing_is_left_to_guess(strategy: str, folder: Path) -> None:
    """No "auto" in the DeepSpeed dict, and the product's clipping and world size in it."""
    loaded = load(folder / "recipe.yaml", [*SPLIT, *DESCENT, f"strategy={strategy}"])
    resolved = resolve(loaded, world_size=2, launcher=Launcher())
    assert '"auto"' not in json.dumps(resolved.deepspeed)
    assert resolved.deepspeed is not None and resolved.deepspeed["gradient_clipping"] == 0.7
    assert resolved.deepspeed["train_batch_size"] == 2
    assert resolved.strategy == strategy and resolved.max_tokens_per_micro_batch == 6


def test_b12_an_accelerate_json_full_of_auto(folder: Path) -> None:
    """All numbers "auto" in the launcher's json, and a model prepared without a dataloader: ours are used."""
    path = folder / "auto.json"
    path.write_text(json.dumps({
        "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto", "zero_optimization": {"stage": 2, "reduce_bucket_size": "auto"}}))
    overrides = ["batch.examples_per_step=8", "batch.max_tokens_per_micro_batch=12", *DESCENT]
    got = spawn("dist.plain:launched_by_accelerate", world_size=2, folder=folder / "auto", timeout_s=60, args={
        "recipe": str(folder / "recipe.yaml"), "overrides": overrides, "rows": ROWS, "json": str(path)})
    for rank in got:
        # 2 micro-batches x 2 rows x 2 ranks = 8 rows in one step
        assert rank == {"clipping": 0.7, "auto_left": False, "strategy": "zero2", "examples": [8],
                        "micro_batches": [2], "rows": [2, 2], "engine_steps": 1}


def test_b13_zero1_bf16_keeps_the_last_micro_batch(ran: list[dict[str, Any]], folder: Path,
                                                   want: reference.Result) -> None:
    """bf16 with fp32 accumulation: after each step the ranks hold the same weights, within 1 % of fp32."""
    assert ran[0]["zero1-bf16"]["hashes"] == ran[1]["zero1-bf16"]["hashes"]
    assert len(set(ran[0]["zero1-bf16"]["hashes"])) == 2
    assert ran[0]["zero1-bf16"]["grad_norm"] == pytest.approx(want.grad_norm, rel=0.01)
    weights = load_file(folder / "out" / "zero1-bf16.safetensors")
    before = load_file(folder / "tiny" / "model.safetensors")
    for name, value in want.weights.items():
        assert torch.linalg.vector_norm(weights[name].float() - value) <= 0.01 * torch.linalg.vector_norm(value), name
    assert any(not torch.equal(weights[name].float(), before[name]) for name in before)


def test_b13_stage_0_under_deepspeed_is_refused(folder: Path) -> None:
    path = folder / "stage0.json"
    path.write_text(json.dumps({"zero_optimization": {"stage": 0}}))
    with pytest.raises(ConfigError, match="ZeRO stage 0 is not offered; use 1, 2 or 3, or ddp without DeepSpeed"):
        from_environment({"ACCELERATE_MIXED_PRECISION": "bf16", "ACCELERATE_USE_DEEPSPEED": "true",
                          "ACCELERATE_DEEPSPEED_CONFIG_FILE": str(path)})
    with pytest.raises(ConfigError, match="zero_optimization.stage=0 contradicts strategy=zero1"):
        resolve(load(folder / "recipe.yaml", ["strategy=zero1"]), world_size=2,
                launcher=Launcher(deepspeed_file=path))
