"""Memory runs out on one rank: all of them do the step again in smaller micro-batches, and the curve stays the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from dist.given import TINY, save_model, tiny_row, write_chats, write_recipe
from dist.harness import spawn

# 16 rows of 4 to 9 tokens by 8, on two ranks, in micro-batches of at most 36 tokens: one or two a rank and step.
ROWS = [tiny_row(4 + n % 6, 1 + n % 3, n) for n in range(16)]
COMMON = ["batch.examples_per_step=8", "data.packing=false", "optim.lr=1e-3", "schedule.max_steps=4",
          "schedule.kind=constant"]
WIDE, NARROW = ["batch.max_tokens_per_micro_batch=36"], ["batch.max_tokens_per_micro_batch=18"]
CASES = [(strategy, where) for strategy in ("ddp", "zero1", "zero2") for where in ("before", "after")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("memory")
    write_recipe(path / "recipe.yaml", save_model(path / "tiny", "llama", **TINY),
                 write_chats(path / "unused.jsonl", []))
    return path


def spawned(folder: Path, runs: dict[str, Any], name: str, *, world_size: int = 2) -> list[dict[str, Any]]:
    return spawn("dist.bodies_memory:train_short", world_size=world_size, folder=folder / name, timeout_s=150,
                 args={"recipe": str(folder / "recipe.yaml"), "runs": runs})


@pytest.fixture(scope="module")
def ran(folder: Path) -> list[dict[str, Any]]:
    calm = {"rows": ROWS, "capacity": 10 ** 6, "where": "before"}
    runs: dict[str, Any] = {}
    for strategy in ("ddp", "zero1", "zero2"):
        runs[f"{strategy}-wide"] = calm | {"overrides": [*COMMON, *WIDE, f"strategy={strategy}"]}
        runs[f"{strategy}-narrow"] = calm | {"overrides": [*COMMON, *NARROW, f"strategy={strategy}"]}
    for strategy, where in CASES:
        runs[f"{strategy}-{where}"] = {"rows": ROWS, "capacity": 20, "where": where,
                                       "overrides": [*COMMON, *WIDE, f"strategy={strategy}"]}
    # Of the many micro-batches of a step, the first fails in a backward pass in which ddp does not communicate.
    runs["ddp-backward"] = {"rows": ROWS, "capacity": 16, "where": "backward", "overrides": [
        *COMMON, *NARROW, "strategy=ddp"]}
    runs["ddp-narrower"] = calm | {"overrides": [*COMMON, "batch.max_tokens_per_micro_batch=9", "strategy=ddp"]}
    # Once all went well for a while; and a later session, which knows what the first one found.
    runs["ddp-late"] = {"rows": ROWS, "capacity": 20, "where": "before", "from_micro_step": 2, "folder": "late",
                        "overrides": [*COMMON, *WIDE, "strategy=ddp"]}
    runs["ddp-later"] = calm | {"folder": "late", "overrides": [*COMMON, *WIDE, "strategy=ddp"]}
    return spawned(folder, runs, "ran")


def same(folder: Path, got: dict[str, Any], want: dict[str, Any], names: tuple[str, str], rel: float) -> None:
    for key in ("loss", "grad_norm"):
        assert got[key] == pytest.approx(want[key], rel=rel), key
    for key in ("lr", "supervised_tokens", "tokens", "examples"):
        assert got[key] == want[key], key
    weights, wanted = (load_file(folder / "ran" / f"{name}.safetensors") for name in names)
    for key, value in wanted.items():
        assert weights[key] == pytest.approx(value, abs=2 * rel), key


@pytest.mark.parametrize(("strategy", "where"), CASES)
def test_all_ranks_fall_to_the_same_micro_batch(strategy: str, where: str, ran: list[dict[str, Any]], folder: Path
                                                ) -> None:
    name = f"{strategy}-{where}"
    for rank in ran:
        assert rank[name]["ended"] == "done" and rank[name]["limit"] == 18
    got = ran[0][name]
    assert got["micro_batches"] == ran[0][f"{strategy}-narrow"]["micro_batches"] != \
        ran[0][f"{strategy}-wide"]["micro_batches"]
    same(folder, got, ran[0][f"{strategy}-narrow"], (name, f"{strategy}-narrow"), 1e-6)
    same(folder, got, ran[0][f"{strategy}-wide"], (name, f"{strategy}-wide"), 1e-5)
    assert json.loads(got["file"]) == {"asked": 36, "max_tokens_per_micro_batch": 18}
    assert [line["max_tokens_per_micro_batch"] for line in got["lines"]] == [18] * 4
    assert all("max_tokens_per_micro_batch" not in line for line in ran[0][f"{strategy}-narrow"]["lines"])


def test_a_backward_pass_that_communicates_nothing_can_be_done_again(ran: list[dict[str, Any]], folder: Path) -> None:
    assert min(ran[0]["ddp-narrow"]["micro_batches"]) > 1
    for rank in ran:
        assert rank["ddp-backward"]["ended"] == "done" and rank["ddp-backward"]["limit"] == 9
    same(folder, ran[0]["ddp-backward"], ran[0]["ddp-narrower"], ("ddp-backward", "ddp-narrower"), 1e-6)


def test_steps_before_it_are_as_they_were(ran: list[dict[str, Any]]) -> None:
    got, wide = ran[0]["ddp-late"], ran[0]["ddp-wide"]
    assert got["loss"] == pytest.approx(wide["loss"], rel=1e-5)
    limits = [line.get("max_tokens_per_micro_batch") for line in got["lines"]]
    assert limits[0] is None and limits[-1] == 18 and limits.index(18) == limits.count(None)
    assert ran[0]["ddp-later"]["limit"] == ran[1]["ddp-later"]["limit"] == 18


@pytest.fixture(scope="module")
def alone(folder: Path) -> dict[str, Any]:
    """One rank, whose backward passes nobody waits in; and an example that never fits."""
    common = {"rows": ROWS, "where": "backward", "capacity": 20}
    runs: dict[str, Any] = {"backward": common | {"overrides": [*COMMON, *WIDE]},
                            "never": common | {"capacity": 8, "overrides": [*COMMON, *WIDE]}}
    for strategy in ("zero1", "zero2", "zero3"):
        runs[strategy] = common | {"overrides": [*COMMON, *WIDE, f"strategy={strategy}"]}
    runs["zero3-before"] = common | {"where": "before", "overrides": [*COMMON, *WIDE, "strategy=zero3"]}
    return spawned(folder, runs, "alone", world_size=1)[0]


def test_one_rank_can_always_do_it_again(alone: dict[str, Any]) -> None:
    assert alone["backward"]["ended"] == "done" and alone["backward"]["limit"] == 18


def test_a_row_that_never_fits_is_named(alone: dict[str, Any]) -> None:
    assert alone["never"]["ended"].startswith("TrainingError: step 1: rows:")
    assert " has 9 tokens and does not fit into memory even alone" in alone["never"]["ended"]
    assert "strategy=zero3" in alone["never"]["ended"] and "gradient_checkpointing" in alone["never"]["ended"]
    assert alone["never"]["lines"] == []


@pytest.mark.parametrize("name", ["zero1", "zero2", "zero3", "zero3-before"])
def test_inside_zeros_own_work_the_next_start_is_told(name: str, alone: dict[str, Any]) -> None:
    assert alone[name]["ended"].startswith("OutOfMemory: out of memory in step 1 with micro-batches of up to 36 tokens")
    assert json.loads(alone[name]["file"]) == {"asked": 36, "max_tokens_per_micro_batch": 18}
