"""cases.md, theme 1: loss normalisation, the last window, the schedule."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from dist import reference
from dist.given import LLAMA, TINY, TOKENIZER, VOCABULARY, save_model, tiny_row, write_recipe, write_texts
from dist.harness import spawn
from dist.reference import Row, Settings
from dist.toy import save_bigram
from shardwise.config.load import load
from shardwise.config.resolve import plan_steps
from shardwise.train.schedule import lr_at

FOUR, ONE = 1, 2
"""Tokens of the toy model: each is followed by itself with a cross-entropy of 4.0 and of 1.0."""
# One plain step of gradient descent with rate 1: the weights move by the gradient itself.
DESCENT = ["optim.name=sgd", "optim.lr=1", "optim.max_grad_norm=null", "schedule.kind=constant"]
PLAIN = {"optimizer": "sgd", "lr": 1.0, "weight_decay": 0.0, "max_grad_norm": None, "kind": "constant", "epochs": 1}


def self_loss(cross_entropy: float, vocabulary: int) -> float:
    """The logit of one token, all others 0, that gives it this cross-entropy."""
    return math.log((vocabulary - 1) / (math.exp(cross_entropy) - 1))


def toy_table() -> torch.Tensor:
    table = torch.zeros(8, 8)
    table[FOUR, FOUR], table[ONE, ONE] = self_loss(4.0, 8), self_loss(1.0, 8)
    return table


def repeated(token: int, targets: int) -> Row:
    return [token] * (targets + 1), [0] + [1] * targets


UNEVEN = [tiny_row(4, 1, 0), tiny_row(12, 9, 1)]
B01 = ["batch.examples_per_step=2", "batch.max_tokens_per_micro_batch=12", "data.packing=false", *DESCENT]
B05 = ["batch.examples_per_step=4", "batch.max_tokens_per_micro_batch=6", "data.packing=false", "optim.name=sgd",
       "optim.lr=1", "schedule.kind=linear", "schedule.epochs=2"]
B06 = ["batch.examples_per_step=24", "batch.max_tokens_per_micro_batch=12", "data.packing=false",
       "schedule.epochs=2", "schedule.warmup_ratio=0.1"]
ROWS = {"toy_window": [repeated(FOUR, 1), repeated(ONE, 9)], "toy_ranks": [repeated(FOUR, 2), repeated(ONE, 8)],
        "tiny": UNEVEN, "ten": [tiny_row(6, 1 + n % 5, n) for n in range(10)],
        "hundred_and_three": [tiny_row(3, 1 + n % 2, n) for n in range(103)]}
RUNS: dict[int, dict[str, tuple[str, str, list[str]]]] = {
    1: {"b01-toy": ("toy_window", "toy", B01), "b01-tiny": ("tiny", "tiny", B01), "b05": ("ten", "tiny", B05),
        "b06": ("hundred_and_three", "tiny", B06)},
    2: {"b02-toy": ("toy_ranks", "toy", B01), "b02-tiny": ("tiny", "tiny", B01), "b05": ("ten", "tiny", B05),
        "b05-zero2": ("ten", "tiny", [*B05, "strategy=zero2"]), "b06": ("hundred_and_three", "tiny", B06)},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("theme1")
    save_model(path / "tiny", "llama", **TINY)
    save_model(path / "llama", "llama", vocab_size=VOCABULARY, **LLAMA)
    save_bigram(path / "toy", toy_table())
    write_texts(path / "texts.jsonl", ["ab cd?", "xy"])
    write_recipe(path / "recipe.yaml", path / "llama", path / "texts.jsonl")
    return path


@pytest.fixture(scope="module")
def ran(folder: Path) -> dict[int, list[dict[str, Any]]]:
    """{world size: what each rank saw of each run}."""
    return {size: spawn("dist.plain:train_rows", world_size=size, folder=folder / f"x{size}", timeout_s=90, args={
        "recipe": str(folder / "recipe.yaml"), "runs": {
            name: {"rows": ROWS[rows], "overrides": [f"model.path={folder / model}", *overrides]}
            for name, (rows, model, overrides) in runs.items()}}) for size, runs in RUNS.items()}


def moved(folder: Path, model: str, size: int, name: str) -> dict[str, torch.Tensor]:
    """Weights before minus weights after: with DESCENT, the gradient."""
    before, after = load_file(folder / model / "model.safetensors"), load_file(folder / f"x{size}/{name}.safetensors")
    return {key: before[key] - after[key] for key in before}


def toy_gradient(rows: list[Row]) -> torch.Tensor:
    """Of the mean cross-entropy over all targets, by autograd in one batch."""
    table = toy_table().requires_grad_()
    inputs = torch.tensor([token for ids, _ in rows for token in ids[:-1]])
    targets = torch.tensor([token for ids, _ in rows for token in ids[1:]])
    torch.nn.functional.cross_entropy(table[inputs], targets).backward()
    return table.grad


@pytest.mark.parametrize(("case", "size", "loss"), [("b01", 1, 1.3), ("b02", 2, 1.6)])
def test_b01_b02_the_logged_loss(case: str, size: int, loss: float, ran: dict[int, list[dict[str, Any]]],
                                 folder: Path) -> None:
    """Means of 4.0 and 1.0 over 1 and 9 tokens in one rank's window; sums of 8 over 2 and 8 tokens on two ranks."""
    for rank in ran[size]:
        assert [step["loss"] for step in rank[f"{case}-toy"]["logged"]] == pytest.approx([loss], abs=1e-6)
    assert ran[size][0][f"{case}-toy"]["micro_batches"] == [2 // size]
    rows = ROWS["toy_window" if case == "b01" else "toy_ranks"]
    assert moved(folder, "toy", size, f"{case}-toy")["table"] == pytest.approx(toy_gradient(rows), abs=1e-6)


@pytest.mark.parametrize(("case", "size"), [("b01", 1), ("b02", 2)])
def test_b01_b02_the_gradient_is_the_references(case: str, size: int, ran: dict[int, list[dict[str, Any]]],
                                                folder: Path) -> None:
    want = reference.train(folder / "tiny", UNEVEN, Settings(examples_per_step=2, **PLAIN))
    assert ran[size][0][f"{case}-tiny"]["loss"] == pytest.approx(want.loss, rel=1e-6)
    for name, gradient in moved(folder, "tiny", size, f"{case}-tiny").items():
        assert gradient == pytest.approx(want.gradients[0][name], abs=1e-6), name


def test_b04_only_predicted_labels_are_counted(folder: Path) -> None:
    """Blocks of 5 and 3 tokens, all live: 4 + 2 = 6 targets, in one padded batch and one row at a time."""
    common = ["data.task=pretrain", "data.max_length=5", "data.packing=false", "batch.examples_per_step=2", *DESCENT]
    runs = {"together": [*common, "batch.max_tokens_per_micro_batch=10"],
            "apart": [*common, "batch.max_tokens_per_micro_batch=5"]}
    got = spawn("dist.bodies:train_all", world_size=1, folder=folder / "b04", timeout_s=60,
                args={"recipe": str(folder / "recipe.yaml"), "runs": runs})[0]
    tokenizer = Tokenizer.from_file(str(TOKENIZER / "tokenizer.json"))
    rows = reference.text_rows(tokenizer, ["ab cd?", "xy"], block=5, end=tokenizer.token_to_id("<|im_end|>"))
    assert [len(ids) for ids, _ in rows] == [5, 3]
    want = reference.train(folder / "llama", rows, Settings(examples_per_step=2, **PLAIN))
    before = load_file(folder / "llama" / "model.safetensors")
    for name, micro_batches in (("together", 1), ("apart", 2)):
        assert got[name]["micro_batches"] == [micro_batches]
        assert got[name]["supervised_tokens"] == [6] == want.supervised_tokens
        assert got[name]["loss"] == pytest.approx(want.loss, rel=1e-6)
        after = load_file(folder / "b04" / f"{name}.safetensors")
        for key, gradient in want.gradients[0].items():
            assert before[key] - after[key] == pytest.approx(gradient, abs=1e-6), (name, key)


RATES = [1, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6]


def test_b05_the_schedule_as_planned(folder: Path) -> None:
    config = load(folder / "recipe.yaml", B05).config
    plan = plan_steps(config, lambda epoch: 10)
    assert plan.num_steps == 6
    rates = [lr_at(step, peak=1.0, plan=plan, schedule=config.schedule) for step in range(6)]
    assert rates == pytest.approx(RATES, abs=1e-12)


@pytest.mark.parametrize(("size", "name"), [(1, "b05"), (2, "b05"), (2, "b05-zero2")])
def test_b05_the_schedule_as_the_optimizer_saw_it(size: int, name: str, ran: dict[int, list[dict[str, Any]]]) -> None:
    for rank in ran[size]:
        for used, rate in zip(rank[name]["lrs"], RATES, strict=True):
            assert used == pytest.approx([rate] * len(used), abs=1e-12) and used
    assert ran[size][0][name]["lr"] == pytest.approx(RATES, abs=1e-12)
    assert ran[size][0][name]["micro_batches"] == [4 // size, 4 // size, 2 // size] * 2


@pytest.mark.parametrize("size", [1, 2])
def test_b06_plan_horizon_and_steps_agree(size: int, ran: dict[int, list[dict[str, Any]]], folder: Path) -> None:
    """103 rows by 24 on 2 ranks, 4 rows a micro-batch: 13 of them per rank, 5 steps an epoch, 10 in all."""
    config = load(folder / "recipe.yaml", B06).config
    plan = plan_steps(config, lambda epoch: 103)
    assert (plan.steps_per_epoch, plan.num_steps, plan.warmup_steps) == (5, 10, 1)
    for rank in ran[size]:
        got = rank["b06"]
        assert "steps: 103 examples / 24 = 5 per epoch, 10 in all, warm-up 1" in got["plan"]
        assert len(got["lrs"]) == len(got["logged"]) == 10
    got = ran[size][0]["b06"]
    rates = [lr_at(s, peak=config.optim.lr, plan=plan, schedule=config.schedule) for s in range(10)]
    assert got["lr"] == rates and got["lrs"] == [[rate] for rate in rates]
    assert sum(got["micro_batches"]) == 2 * (13 if size == 2 else 26)
