"""cases.md, theme 6: clipping and precision."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from dist import reference
from dist.given import TINY, save_model, tiny_row, write_chats, write_recipe
from dist.harness import spawn
from dist.reference import Settings
from dist.toy import save_bigram
from shardwise.config.launcher import Launcher
from shardwise.config.load import load
from shardwise.config.resolve import resolve
from shardwise.errors import ConfigError, PreflightError
from shardwise.train.setup import check_precision

STRATEGIES = ("ddp", "zero1", "zero2", "zero3")
ROWS = [tiny_row(6, 1 + n % 5, n) for n in range(8)]
SPLIT = ["batch.examples_per_step=4", "batch.max_tokens_per_micro_batch=6", "data.packing=false",
         "schedule.kind=constant"]
SGD = ["optim.name=sgd", "optim.momentum=0", "schedule.kind=constant"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("theme6")
    save_model(path / "tiny", "llama", **TINY)
    save_bigram(path / "pair", torch.zeros(1, 2))
    save_bigram(path / "ones", torch.ones(1, 2, dtype=torch.bfloat16))
    save_bigram(path / "ones16", torch.ones(1, 2, dtype=torch.float16))
    write_recipe(path / "recipe.yaml", path / "tiny", write_chats(path / "unused.jsonl", []))
    return path


def spawned(body: str, folder: Path, runs: dict[str, Any], *, world_size: int = 2) -> list[dict[str, Any]]:
    return spawn(f"dist.plain:{body}", world_size=world_size, folder=folder / f"{body}-x{world_size}", timeout_s=120,
                 args={"recipe": str(folder / "recipe.yaml"), "runs": runs})


def test_b43_one_norm_per_step_from_before_clipping(folder: Path) -> None:
    """Two micro-batches a step, clip 1.0: the logged norms are the reference's under every strategy."""
    runs = {strategy: {"rows": ROWS, "overrides": [*SPLIT, "optim.lr=1e-3", "optim.max_grad_norm=1.0",
                                                   "schedule.epochs=2", f"strategy={strategy}"]}
            for strategy in STRATEGIES}
    got = spawned("train_rows", folder, runs)
    want = reference.train(folder / "tiny", ROWS, Settings(examples_per_step=4, weight_decay=0.0, kind="constant"))
    assert len(want.grad_norm) == 4 and min(want.grad_norm) > 1.0
    for strategy in STRATEGIES:
        assert got[0][strategy]["micro_batches"] == [2] * 4
        assert got[0][strategy]["grad_norm"] == pytest.approx(want.grad_norm, rel=1e-5), strategy
        for rank in got:
            assert [step["grad_norm"] for step in rank[strategy]["logged"]] == pytest.approx(want.grad_norm, rel=1e-5)


@pytest.fixture(scope="module")
def pushed(folder: Path) -> list[dict[str, Any]]:
    """Runs of the toy model whose gradients are given outright."""
    b44 = {f"b44-{strategy}": {
        "gradients": [[[[3.0, 0.0]]], [[[0.0, 4.0]]]], "steps": 1, "lr": 1.0,
        "overrides": [f"model.path={folder / 'pair'}", f"strategy={strategy}", "optim.max_grad_norm=1", *SGD]}
        for strategy in STRATEGIES}
    # The same in two micro-batches per rank: clipping each of them would give something else.
    halves = {f"halves-{strategy}": b44[f"b44-{strategy}"] | {
        "gradients": [[[[4.0, 0.0]], [[-1.0, 0.0]]], [[[0.0, 1.0]], [[0.0, 3.0]]]]} for strategy in STRATEGIES}
    return spawned("push", folder, b44 | halves)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("kind", ["b44", "halves"])
def test_b44_clipping_is_global_and_once(strategy: str, kind: str, pushed: list[dict[str, Any]]) -> None:
    """[3, 0] and [0, 4]: mean [1.5, 2], norm 2.5, applied [0.6, 0.8]; per rank or micro-batch it would differ."""
    for rank in pushed:
        got = rank[f"{kind}-{strategy}"]
        assert got["norms"] == pytest.approx([2.5], rel=1e-6)
        assert got["before"] == [[0.0, 0.0]]
        # torch and DeepSpeed divide by norm + 1e-6
        assert got["after"][0] == pytest.approx([-0.6, -0.8], abs=1e-6)


def test_b45_clipping_holds_in_bf16(folder: Path) -> None:
    """The loss times 1,000, rate 1: clipped to 1 the weights move by at most 1.01, unclipped by far more."""
    runs = {f"{strategy}-{clip}": {"rows": ROWS, "overrides": [
        *SPLIT, "optim.name=sgd", "optim.lr=1", f"strategy={strategy}", "precision=bf16",
        f"optim.max_grad_norm={clip}"]} for strategy in STRATEGIES for clip in ("1", "null")}
    for rank in spawned("blow_up", folder, runs):
        for strategy in STRATEGIES:
            assert 0.9 < rank[f"{strategy}-1"]["change"] <= 1.01, strategy
            assert rank[f"{strategy}-null"]["change"] > 100, strategy
            assert rank[f"{strategy}-1"]["norm"] > 100, strategy


def test_b46_small_steps_are_not_lost(folder: Path) -> None:
    """A weight 1.0 stored in bf16, gradient -1, rate 1e-5, 1,000 steps: 1.01 (in bf16 it would stay 1.0)."""
    runs = {strategy: {"gradients": [[[[-1.0, -1.0]]]], "steps": 1000, "lr": 1e-5, "overrides": [
        f"model.path={folder / 'ones'}", f"strategy={strategy}", "precision=bf16", "optim.max_grad_norm=null", *SGD]}
        for strategy in ("ddp", "zero2", "zero3")}
    for got in spawned("push", folder, runs, world_size=1)[0].values():
        assert got["before"] == [[1.0, 1.0]]
        assert got["after"][0] == pytest.approx([1.01, 1.01], abs=1e-4)
        assert got["dtype"] == "torch.float32"
        assert any("parameters trained in fp32, arithmetic bf16" in line for line in got["plan"])


def test_b46_half_precision_weights_are_trained_in_fp32_under_fp16(folder: Path) -> None:
    """Stored in fp16 they are held in fp32 from the load on, so that the scaler never meets an fp16 gradient."""
    runs = {"ddp": {"gradients": [[[[-1.0, -1.0]]]], "steps": 1000, "lr": 1e-5, "overrides": [
        f"model.path={folder / 'ones16'}", "strategy=ddp", "precision=fp16", "optim.max_grad_norm=null", *SGD]}}
    got = spawned("push", folder, runs, world_size=1)[0]["ddp"]
    assert got["before"] == [[1.0, 1.0]]
    assert got["after"][0] == pytest.approx([1.01, 1.01], abs=1e-4)
    assert got["dtype"] == "torch.float32" and got["norms"] == pytest.approx([2 ** 0.5] * 3, rel=1e-6)
    assert any("parameters trained in fp32, arithmetic fp16" in line for line in got["plan"])


def test_b46_held_weights_are_never_fp16(folder: Path) -> None:
    with pytest.raises(ConfigError, match="model.dtype=fp16 must be one of auto, fp32, bf16"):
        load(folder / "recipe.yaml", ["model.dtype=fp16"])
    with pytest.raises(ConfigError, match="model.dtype=bf16 contradicts precision=fp16"):
        load(folder / "recipe.yaml", ["model.dtype=bf16", "adapter.kind=lora", "precision=fp16"])


def test_b46_fp16_without_kernels_is_refused_before_the_model_loads(folder: Path) -> None:
    from deepspeed.accelerator import get_accelerator

    resolved = resolve(load(folder / "recipe.yaml", ["precision=fp16", "strategy=zero2"]), world_size=2,
                       launcher=Launcher())
    with patch.object(type(get_accelerator()), "is_fp16_supported", lambda self: False), \
            pytest.raises(PreflightError, match="precision=fp16 with strategy=zero2 needs a GPU, or a CPU with fp16"):
        check_precision(resolved)
