"""The comparison of test_every_split.py must fail for the mistakes it is there to catch."""

from __future__ import annotations

from typing import Any

import pytest
from safetensors.torch import load_file
from tokenizers import Tokenizer

from dist import reference
from dist.given import CHATS, LLAMA, LONGEST, TOKENIZER, VOCABULARY, save_model, write_chats, write_recipe
from dist.harness import spawn
from dist.reference import Settings

MISTAKES = ("mean_of_means", "own_count", "divided_twice", "step_every_micro_batch", "packed_without_borders")
STRATEGIES = ("ddp", "zero1", "zero2", "zero3")
# With an eps of 1e-8 Adam makes a hundredth of a step of the rounding in a gradient of 1e-9, which depends on the CPU.
SETTINGS = Settings(examples_per_step=8, lr=1e-3, weight_decay=0.0, eps=1e-6)
OVERRIDES = ["batch.examples_per_step=8", "optim.lr=1e-3", "optim.eps=1e-6", "schedule.epochs=2", "data.packing=true",
             f"batch.max_tokens_per_micro_batch={LONGEST}"]


@pytest.fixture(scope="module")
def off(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, float]]:
    """Deviations from the reference of every strategy with every mistake, and with none."""
    folder = tmp_path_factory.mktemp("mutations")
    model = save_model(folder / "model", "llama", vocab_size=VOCABULARY, **LLAMA)
    recipe = write_recipe(folder / "recipe.yaml", model, write_chats(folder / "chats.jsonl", CHATS))
    runs: dict[str, Any] = {f"{strategy}-{mistake}": [mistake, [*OVERRIDES, f"strategy={strategy}"]]
                            for strategy in STRATEGIES for mistake in ("none", *MISTAKES)}
    got = spawn("dist.mutants:train_mutants", world_size=2, args={"recipe": str(recipe), "runs": runs},
                folder=folder / "out", timeout_s=30 + 4 * len(runs))[0]
    tokenizer = Tokenizer.from_file(str(TOKENIZER / "tokenizer.json"))
    want = reference.train(model, [reference.chat_row(tokenizer, chat) for chat in CHATS], SETTINGS)
    assert max(got["ddp-none"]["micro_batches"]) > 1
    return {name: reference.deviations(steps, load_file(folder / "out" / f"{name}.safetensors"), want)
            for name, steps in got.items()}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_without_a_mistake_it_agrees(strategy: str, off: dict[str, dict[str, float]]) -> None:
    deviation = off[f"{strategy}-none"]
    assert max(deviation["loss"], deviation["grad_norm"]) <= 1e-5 and deviation["weights"] <= 2e-5, deviation


@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_mistake_is_seen(strategy: str, mistake: str, off: dict[str, dict[str, float]]) -> None:
    """A hundred times over the bound and more (in the weights too, unless clipping hides a constant factor)."""
    deviation = off[f"{strategy}-{mistake}"]
    assert max(deviation["loss"], deviation["grad_norm"]) > 1e-3, deviation
    assert deviation["weights"] > 1e-4 or mistake == "divided_twice", deviation
