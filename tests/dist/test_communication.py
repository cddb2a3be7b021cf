"""DDP communicates gradients once per optimizer step, however many micro-batches the step has (B09)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from dist import reference
from dist.given import LLAMA, TOKENIZER, VOCABULARY, Chat, said, save_model, write_chats, write_recipe
from dist.harness import spawn
from dist.reference import Settings

# 16 rows alike in length, one row per micro-batch: two steps of 2 ranks x 4 micro-batches.
CHATS: list[Chat] = [[{"role": "user", "content": said(9 - n % 8)}, {"role": "assistant", "content": said(1 + n % 8)}]
                     for n in range(16)]
TOKENIZED = [reference.chat_row(Tokenizer.from_file(str(TOKENIZER / "tokenizer.json")), chat) for chat in CHATS]
SETTINGS = Settings(examples_per_step=8, epochs=1, optimizer="sgd", lr=0.1, weight_decay=0.0, max_grad_norm=None)


def run(folder: Path, *, no_sync: bool) -> list[dict[str, Any]]:
    model = save_model(folder / "model", "llama", vocab_size=VOCABULARY, **LLAMA)
    recipe = write_recipe(folder / "recipe.yaml", model, write_chats(folder / "chats.jsonl", CHATS))
    overrides = ["strategy=ddp", "batch.examples_per_step=8", "optim.name=sgd", "optim.lr=0.1", "data.packing=false",
                 "optim.max_grad_norm=null", f"batch.max_tokens_per_micro_batch={max(len(r[0]) for r in TOKENIZED)}"]
    return spawn("dist.mutants:count_communication", world_size=2, folder=folder / "out", timeout_s=60,
                 args={"recipe": str(recipe), "overrides": overrides, "no_sync": no_sync})


def test_b09_one_communication_per_step(tmp_path: Path) -> None:
    for got in run(tmp_path, no_sync=True):
        assert got == {"calls": 2, "buckets": 1, "steps": 2, "micro_batches": 8}
    want = reference.train(tmp_path / "model", TOKENIZED, SETTINGS).gradients
    both = [load_file(tmp_path / "out" / f"gradients-{rank}.safetensors") for rank in (0, 1)]
    assert both[0].keys() == both[1].keys() == {f"{n}/{name}" for n in (0, 1) for name in want[n]}
    for name, gradient in both[0].items():
        step, _, parameter = name.partition("/")
        assert torch.equal(gradient, both[1][name]), name
        assert gradient == pytest.approx(want[int(step)][parameter], abs=1e-6), name


def test_the_counter_counts(tmp_path: Path) -> None:
    """Without no_sync every micro-batch communicates: 8 times."""
    for got in run(tmp_path, no_sync=False):
        assert got == {"calls": 8, "buckets": 1, "steps": 2, "micro_batches": 8}
