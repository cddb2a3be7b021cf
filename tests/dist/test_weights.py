"""Loss weights per token, mixed within examples, on any split: sum w x CE / sum w of the global batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from dist import reference
from dist.given import TINY, save_model, tiny_row, write_recipe, write_texts
from dist.harness import spawn
from dist.reference import Row, Settings

WEIGHTS = torch.tensor([0.0, 0.25, 1.0, 2.0])
SETTINGS = Settings(examples_per_step=5, lr=1e-3, weight_decay=0.1)
OVERRIDES = ["batch.examples_per_step=5", "schedule.epochs=2", "optim.lr=1e-3", "optim.weight_decay=0.1",
             "batch.max_tokens_per_micro_batch=24"]
SPLITS = {f"{strategy}-{'packed' if packing else 'padded'}": [f"strategy={strategy}", f"data.packing={packing}".lower()]
          for strategy in ("ddp", "zero2") for packing in (True, False)}


def weighted_row(length: int, seed: int) -> Row:
    """Every weight there is, in runs of two as a message has them, and none on the prompt."""
    ids, _ = tiny_row(length, 1, seed)
    drawn = WEIGHTS[torch.randint(0, 4, (length,), generator=torch.Generator().manual_seed(seed))]
    return ids, [0.0, 0.0, *drawn.repeat_interleave(2).tolist()[:length - 3], 0.25]


MIXED = [weighted_row(5 + 3 * (n % 6), n) for n in range(13)]
# Some micro-batches carry only weights of 0 and 1 and take the unweighted path beside others that do not.
ROWS = {"mixed": MIXED, "in_part": [*MIXED[:4], *(tiny_row(6 + n, 1 + n, n) for n in range(9))]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("weights")
    save_model(path / "tiny", "llama", **TINY)
    write_texts(path / "texts.jsonl", ["unused"])
    write_recipe(path / "recipe.yaml", path / "tiny", path / "texts.jsonl")
    return path


@pytest.fixture(scope="module")
def got(folder: Path) -> dict[str, Any]:
    runs = {f"{rows}-{name}": {"rows": ROWS[rows], "overrides": [*OVERRIDES, *split]}
            for rows in ROWS for name, split in SPLITS.items()}
    return spawn("dist.plain:train_rows", world_size=2, folder=folder / "out", timeout_s=120,
                 args={"recipe": str(folder / "recipe.yaml"), "runs": runs})[0]


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("rows", ROWS)
def test_weighted_tokens_agree_with_the_reference(rows: str, split: str, got: dict[str, Any], folder: Path) -> None:
    want = reference.train(folder / "tiny", ROWS[rows], SETTINGS)
    run = got[f"{rows}-{split}"]
    assert max(run["micro_batches"]) > 1
    assert run["supervised_tokens"] == want.supervised_tokens
    off = reference.deviations(run, load_file(folder / "out" / f"{rows}-{split}.safetensors"), want)
    assert max(off["loss"], off["grad_norm"]) <= 1e-5 and off["weights"] <= 2e-5, off


def test_the_weights_matter(folder: Path) -> None:
    """The comparison above would see it if they were dropped."""
    flat = [(ids, [float(w > 0) for w in weights]) for ids, weights in MIXED]
    weighted, unweighted = (reference.train(folder / "tiny", rows, SETTINGS) for rows in (MIXED, flat))
    assert weighted.supervised_tokens == unweighted.supervised_tokens
    assert max(abs(a - b) / b for a, b in zip(weighted.loss, unweighted.loss, strict=True)) > 1e-2
    assert max(abs(a - b) / b for a, b in zip(weighted.grad_norm, unweighted.grad_norm, strict=True)) > 1e-2
    assert {w for _, weights in MIXED for w in weights} == set(WEIGHTS.tolist())
