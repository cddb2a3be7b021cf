"""What a run trains on, from a recipe: stored and streamed data refuse and accept the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from dist.given import TOKENIZER, write_recipe, write_texts
from shardwise.config.launcher import Launcher
from shardwise.config.load import load
from shardwise.config.resolve import resolve
from shardwise.errors import DataError
from shardwise.train.inputs import Inputs, load_inputs
from tokenised import write_rows

STREAMED = ["data.streaming=true", "schedule.max_steps=3"]


@pytest.fixture(autouse=True)
def cold_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDWISE_CACHE", str(tmp_path / "cache"))


def inputs(data: Path, *words: str) -> Inputs:
    recipe = write_recipe(data.with_name("recipe.yaml"), TOKENIZER, data)
    return load_inputs(resolve(load(str(recipe), ["data.on_fault.eval_overlap=error", "data.max_length=64",
                                                  "batch.examples_per_step=4", *words]),
                               world_size=2, launcher=Launcher()))


@pytest.mark.parametrize("words", [[], STREAMED])
def test_documents_that_are_evaluated_on_are_not_trained_on(tmp_path: Path, words: list[str]) -> None:
    """Each of them counts, also where it lies in the middle of a block."""
    train = write_texts(tmp_path / "a.jsonl", [f"text number {n}" for n in range(90)])
    held_out = write_texts(tmp_path / "b.jsonl", ["something else", "text number 7", "and so on"])
    words = [*words, f"data.eval=[{held_out}]", "data.task=pretrain"]
    with pytest.raises(DataError, match="eval_overlap"):
        feed = inputs(train, *words).feed({})
        for step in range(3):
            feed.batch(step)
    found = inputs(train, *words, "data.on_fault.eval_overlap=report")
    rows, ids = found.feed({}).batch(0)
    assert len(ids) == 4 and found.held_out is not None and rows.lengths[ids].max() == 64


@pytest.mark.parametrize("words", [[], STREAMED])
def test_chats_that_are_evaluated_on_are_not_trained_on(tmp_path: Path, words: list[str]) -> None:
    train, held_out = write_rows(tmp_path / "a.jsonl", 9), write_rows(tmp_path / "b.jsonl", 3, first=8)
    with pytest.raises(DataError, match="eval_overlap"):
        feed = inputs(train, *words, f"data.eval=[{held_out}]").feed({})
        for step in range(3):  # a stream meets it on the way
            feed.batch(step)


def test_what_was_streamed_is_named_where_nothing_was_counted(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.jsonl", 9)
    stored, streamed = inputs(path), inputs(path, *STREAMED)
    assert stored.counts is not None and stored.counts["examples"] == 9 and streamed.counts is None
    assert streamed.plan.num_steps == 3 and streamed.plan.examples is None and stored.plan.examples == 9
    assert len(streamed.sample) > 4 and streamed.identity == inputs(path, *STREAMED).identity
    write_rows(path, 10)
    assert streamed.identity != inputs(path, *STREAMED).identity
