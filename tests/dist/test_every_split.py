"""THE test of this project: however a step is split, it is the same step.

Every strategy, on one and two ranks, at several micro-batch sizes, packed and padded, against a second
implementation that knows nothing of any of it (reference.py): loss and gradient norm of every step and every
evaluation within 1e-5 relative, the final weights within 2e-5. Only where DeepSpeed's own CPU Adam does the step
the bound is 1e-4.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from tokenizers import Tokenizer

from dist import reference
from dist.given import (
    CHATS,
    LLAMA,
    LONGEST,
    TOKENIZER,
    VOCABULARY,
    said,
    save_model,
    write_chats,
    write_recipe,
    write_texts,
)
from dist.harness import spawn
from dist.reference import Result, Row, Settings

STRATEGIES = ("ddp", "zero1", "zero2", "zero3", "zero3+params")
LIMITS = (LONGEST, 160, 640)
TEXTS = [said(count) + "." for count in (3, 40, 1, 22, 17, 60, 2)]

# Two epochs of 21 rows by 8: the steps have 8, 8 and 5 rows.
ADAMW = Settings(examples_per_step=8, lr=1e-3, weight_decay=0.1, warmup_steps=2)
SGD = replace(ADAMW, optimizer="sgd", lr=0.05, weight_decay=0.01, momentum=0.9)
# By 5, which two ranks cannot share equally, and the last step of an epoch has 1 row: a rank has nothing to do.
# Without clipping, and with evaluations before and after.
BY_FIVE = replace(ADAMW, examples_per_step=5, kind="linear", max_grad_norm=None, held_out=7)
MODELS: dict[str, dict[str, Any]] = {
    "llama": LLAMA | {"model_type": "llama", "tie_word_embeddings": False},
    "qwen2": LLAMA | {"model_type": "qwen2", "tie_word_embeddings": True},
    "gpt_neox": LLAMA | {"model_type": "gpt_neox", "hidden_dropout": 0.0, "attention_dropout": 0.0},
    "qwen3_moe": LLAMA | {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2,
                          "moe_intermediate_size": 32, "router_aux_loss_coef": 0.1,
                          "mlp_only_layers": [], "decoder_sparse_step": 1, "head_dim": 8},
}


@dataclass(frozen=True, kw_only=True)
class Run:
    """One way to split a training."""

    strategy: str
    world_size: int
    limit: int = 160
    packing: bool = True
    settings: Settings = ADAMW
    model: str = "llama"
    data: str = "chats"
    block: int = 48

    @property
    def name(self) -> str:
        kind = {ADAMW: "adamw", SGD: "sgd", BY_FIVE: "by5"}[self.settings]
        return f"{self.strategy}-x{self.world_size}-{self.limit}-{'packed' if self.packing else 'padded'}" \
               f"-{kind}-{self.model}-{self.data}"

    @property
    def bounds(self) -> tuple[float, float]:
        """(relative for loss and gradient norm, absolute for weights)."""
        cpu_adam = "+" in self.strategy and self.settings.optimizer == "adamw"
        return (1e-4, 1e-4) if cpu_adam else (1e-5, 2e-5)

    def overrides(self, folder: Path) -> list[str]:
        strategy, _, offload = self.strategy.partition("+")
        s = self.settings
        scored = f"{{path: {folder / 'chats.jsonl'}, limit: {s.held_out}}}"
        split = [f"strategy={strategy}", f"offload={offload or 'none'}", f"data.packing={str(self.packing).lower()}",
                 f"batch.max_tokens_per_micro_batch={self.limit}"]
        task = ["data.task=sft"] if self.data == "chats" else ["data.task=pretrain", f"data.max_length={self.block}",
                                                               f"data.train=[{folder / 'texts.jsonl'}]"]
        return [*split, *task, f"model.path={folder / self.model}", f"run.seed={s.seed}",
                f"batch.examples_per_step={s.examples_per_step}", f"schedule.epochs={s.epochs}",
                f"schedule.kind={s.kind}", f"schedule.warmup_steps={s.warmup_steps}", f"optim.name={s.optimizer}",
                f"optim.lr={s.lr}", f"optim.weight_decay={s.weight_decay}", f"optim.momentum={s.momentum}",
                f"optim.max_grad_norm={s.max_grad_norm}", f"data.eval=[{scored if s.held_out else ''}]"]


RUNS = [Run(strategy=strategy, world_size=world_size, limit=limit, packing=packing)
        for world_size in (1, 2) for strategy in STRATEGIES for limit in LIMITS for packing in (True, False)]
for n, strategy in enumerate(STRATEGIES):
    RUNS += [Run(strategy=strategy, world_size=world_size, packing=(n + world_size) % 2 == 0, settings=SGD)
             for world_size in (1, 2)]
    RUNS += [Run(strategy=strategy, world_size=2, packing=packing, settings=BY_FIVE) for packing in (True, False)]
RUNS += [Run(strategy=f"{strategy}+optimizer", world_size=2) for strategy in ("zero1", "zero2", "zero3")]
RUNS += [Run(strategy=strategy, world_size=world_size, data="texts", packing=world_size == 2)
         for strategy in ("ddp", "zero2", "zero3") for world_size in (1, 2)]
RUNS += [Run(strategy=strategy, world_size=2, model=model, packing=packing, settings=SGD)
         for model in ("qwen2", "gpt_neox", "qwen3_moe")
         for strategy, packing in (("ddp", True), ("zero2", False), ("zero3", True))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models, data and the recipe."""
    path = tmp_path_factory.mktemp("every_split")
    for name, fields in MODELS.items():
        save_model(path / name, vocab_size=VOCABULARY, **fields)
    write_chats(path / "chats.jsonl", CHATS)
    write_texts(path / "texts.jsonl", TEXTS)
    write_recipe(path / "recipe.yaml", path / "llama", path / "chats.jsonl")
    return path


@pytest.fixture(scope="module")
def ran(folder: Path, request: pytest.FixtureRequest) -> Callable[[Run], dict[str, Any]]:
    """The metrics of a run; the same ranks carry out all wanted runs of a world size, at the first use."""
    wanted = [item.callspec.params["run"] for item in request.session.items
              if item.path == request.path and hasattr(item, "callspec")]

    @cache
    def of(world_size: int) -> dict[str, Any] | AssertionError:
        runs = {run.name: run.overrides(folder) for run in wanted if run.world_size == world_size}
        try:
            return spawn("dist.bodies:train_all", world_size=world_size, timeout_s=60 + 4 * len(runs),
                         args={"recipe": str(folder / "recipe.yaml"), "runs": runs},
                         folder=folder / f"x{world_size}")[0]
        except AssertionError as error:
            return error  # so that it is not tried again for every run

    def result(run: Run) -> dict[str, Any]:
        results = of(run.world_size)
        if isinstance(results, AssertionError):
            raise results
        return results[run.name]

    return result


@pytest.fixture(scope="module")
def expected(folder: Path) -> Callable[[Run], Result]:
    """What the reference says of a run; it depends on nothing of the split."""
    tokenizer = Tokenizer.from_file(str(TOKENIZER / "tokenizer.json"))
    chats = [reference.chat_row(tokenizer, chat) for chat in CHATS]

    @cache
    def of(model: str, data: str, settings: Settings) -> Result:
        return reference.train(folder / model, chats if data == "chats" else texts(tokenizer), settings)

    return lambda run: of(run.model, run.data, run.settings)


def texts(tokenizer: Tokenizer) -> list[Row]:
    return reference.text_rows(tokenizer, TEXTS, block=Run.block, end=tokenizer.token_to_id("<|im_end|>"))


@pytest.mark.timeout(600)
@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.name)
def test_every_split(run: Run, folder: Path, ran: Callable[[Run], dict[str, Any]],
                     expected: Callable[[Run], Result]) -> None:
    got, want = ran(run), expected(run)
    assert got["packing"] is run.packing
    assert max(got["micro_batches"]) > 1 or run.limit > LONGEST
    assert got["step"] == list(range(1, len(want.loss) + 1))
    assert got["supervised_tokens"] == want.supervised_tokens
    assert got["lr"] == pytest.approx(want.lr, rel=1e-12)
    weights = load_file(folder / f"x{run.world_size}" / f"{run.name}.safetensors")
    off = reference.deviations(got, weights, want)
    print(f"deviations of {run.name}: {off}")  # pytest -rP shows them
    relative, absolute = run.bounds
    assert len(got["eval_loss"]) == 2 * bool(run.settings.held_out)
    assert max(off["loss"], off["grad_norm"], off["eval_loss"]) <= relative and off["weights"] <= absolute, off


def test_the_steps_are_split_in_many_ways() -> None:
    """The rows are as unequal as the comparison needs them to be."""
    tokenizer = Tokenizer.from_file(str(TOKENIZER / "tokenizer.json"))
    rows = [reference.chat_row(tokenizer, chat) for chat in CHATS]
    counts = sorted(sum(supervised) for _, supervised in rows)
    assert counts[:3] == [1, 1, 1] and counts[-1] > 90 and max(len(ids) for ids, _ in rows) == LONGEST
    assert [len(step) for step in reference.batches(len(rows), BY_FIVE)] == [5, 5, 5, 5, 1] * 2


def test_the_reference_shares_no_code() -> None:
    for path in (Path(reference.__file__), Path(reference.__file__).with_name("given.py")):
        names = [node.module or "" for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
                 if isinstance(node, ast.ImportFrom)]
        names += [alias.name for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
                  if isinstance(node, ast.Import) for alias in node.names]
        assert not [name for name in names if name.split(".")[0] in ("shardwise", "dist")], path
