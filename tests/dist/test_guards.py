"""A step that must not be taken leaves no trace: weights and optimizer are those of a run that never had it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dist.given import TINY, save_model, tiny_row, write_chats, write_recipe
from dist.harness import spawn

# 8 rows by 4 on two ranks, one row a micro-batch: two steps of two micro-batches on each rank, over and over.
ROWS = [tiny_row(6, 1 + n % 5, n) for n in range(8)]
SPLIT = ["batch.examples_per_step=4", "batch.max_tokens_per_micro_batch=6", "data.packing=false", "optim.lr=1e-2",
         "schedule.max_steps=6"]
SPLITS = {"ddp": ["strategy=ddp"], "zero1": ["strategy=zero1"], "zero2": ["strategy=zero2"],
          "zero3": ["strategy=zero3"], "zero2-offload": ["strategy=zero2", "offload=optimizer"],
          "zero3-offload": ["strategy=zero3", "offload=params"]}
NAMES = [f"{split}-{precision}" for split in SPLITS for precision in ("fp32", "bf16")]


def overrides_of(name: str) -> list[str]:
    split, _, precision = name.rpartition("-")
    return [*SPLIT, *SPLITS[split], f"precision={precision}"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("guards")
    write_recipe(path / "recipe.yaml", save_model(path / "tiny", "llama", **TINY),
                 write_chats(path / "unused.jsonl", []))
    return path


def spawned(folder: Path, runs: dict[str, Any], name: str, timeout_s: float = 240) -> list[dict[str, Any]]:
    return spawn("dist.bodies_guards:train_struck", world_size=2, folder=folder / name, timeout_s=timeout_s,
                 args={"recipe": str(folder / "recipe.yaml"), "runs": runs})


@pytest.fixture(scope="module")
def struck(folder: Path) -> list[dict[str, Any]]:
    """Every split with one bad gradient element on rank 1 in steps 2 and 4, and the same without those steps."""
    runs: dict[str, Any] = {}
    for name in NAMES:
        common = {"rows": ROWS, "overrides": [*overrides_of(name), "guard.non_finite=skip"]}
        runs[name] = common | {"strikes": {"2": "nan", "4": "inf"}}
        runs[f"{name}-without"] = common | {"omit": [2, 4]}
    return spawned(folder, runs, "struck")


@pytest.mark.parametrize("name", NAMES)
def test_one_bad_element_on_one_rank_moves_nothing_on_any(name: str, struck: list[dict[str, Any]]) -> None:
    for rank in struck:
        got, want = rank[name], rank[f"{name}-without"]
        assert got["ended"] == "done"
        # Weights, fp32 masters and optimizer state, to the last bit: step 2 left what step 1 did, step 4 what 3 did.
        assert got["hashes"][1] == got["hashes"][0] and got["hashes"][3] == got["hashes"][2]
        assert len({got["start"], *got["hashes"]}) == 5  # the others moved them
        # And nothing lingers: the next steps have the norms and lead to the weights of a run without the bad ones.
        assert got["hashes"] == want["hashes"] and got["norms"] == want["norms"]
        assert [norm is None for norm in got["norms"]] == [False, True, False, True, False, False]


@pytest.mark.parametrize("name", NAMES)
def test_what_is_written_of_a_skipped_step(name: str, struck: list[dict[str, Any]]) -> None:
    lines, guard = struck[0][name]["metrics"], struck[0][name]["guard"]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert [line.get("skipped") for line in lines] == [None, "non_finite", None, "non_finite", None, None]
    assert ["loss" in line for line in lines] == [True, False, True, False, True, True]
    assert [(line["step"], line["kind"], line["action"], line["grad_norm"]) for line in guard] == [
        (2, "non_finite", "skip", None), (4, "non_finite", "skip", None)]
    assert [len(set(line["examples"])) for line in guard] == [4, 4]
    assert guard[0]["places"] == [f"rows:{i + 1}" for i in guard[0]["examples"]]
    assert guard[0]["loss"] == pytest.approx(struck[0][f"{name}-without"]["metrics"][0]["loss"], rel=1)
