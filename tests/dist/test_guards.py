"""A step that must not be taken leaves no trace: weights and optimizer are those of a run that never had it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dist import reference
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


@pytest.fixture(scope="module")
def answered(folder: Path) -> list[dict[str, Any]]:
    """What follows a bad step, in the strategies that differ."""
    runs: dict[str, Any] = {}
    for name in ("ddp-fp32", "zero2-fp32", "zero3-fp32"):
        common = {"rows": ROWS, "overrides": [*overrides_of(name), "checkpoint.every_steps=2"]}
        back = common | {"overrides": [*common["overrides"], "guard.non_finite=rollback"]}
        skip = common | {"overrides": [*common["overrides"], "guard.non_finite=skip"]}
        runs[f"{name}-back"] = back | {"strikes": {"4": "nan"}}
        runs[f"{name}-back-without"] = skip | {"omit": [3, 4]}
        runs[f"{name}-back-to-the-start"] = back | {"strikes": {"2": "inf"}}
        runs[f"{name}-back-to-the-start-without"] = skip | {"omit": [1, 2]}
        runs[f"{name}-stop"] = common | {"folder": f"{name}-stop", "strikes": {"3": "loss nan"}}
        runs[f"{name}-stop-again"] = skip | {"folder": f"{name}-stop", "strikes": {"5": "nan"}}
        runs[f"{name}-stop-without"] = skip | {"omit": [5]}
        runs[f"{name}-in-a-row"] = skip | {"overrides": [*skip["overrides"], "guard.max_skips=2"],
                                           "strikes": {"2": "nan", "3": "loss nan", "4": "inf"}}
    return spawned(folder, runs, "answered")


THREE = pytest.mark.parametrize("name", ["ddp-fp32", "zero2-fp32", "zero3-fp32"])


@THREE
@pytest.mark.parametrize(("case", "bad", "checkpoint"), [("back", 4, 2), ("back-to-the-start", 2, 0)])
def test_rollback_leaves_out_the_steps_since_the_checkpoint(name: str, case: str, bad: int, checkpoint: int,
                                                            answered: list[dict[str, Any]]) -> None:
    for rank in answered:
        got, want = rank[f"{name}-{case}"], rank[f"{name}-{case}-without"]
        assert got["ended"] == "done" and got["hashes"][bad - 1] == got["hashes"][bad - 2]
        assert got["hashes"][bad:] == want["hashes"][bad:] and got["norms"][bad:] == want["norms"][bad:]
        assert len(set(got["hashes"][bad:])) == 6 - bad
    line = answered[0][f"{name}-{case}"]["guard"]
    assert [(entry["step"], entry["action"]) for entry in line] == [(bad, "rollback")]


@THREE
def test_b51_stop_ends_both_ranks_at_the_same_step(name: str, answered: list[dict[str, Any]]) -> None:
    for rank in answered:
        got = rank[f"{name}-stop"]
        assert len(got["hashes"]) == 3 and got["hashes"][2] == got["hashes"][1]
        assert got["ended"].startswith("TrainingError: step 3: the loss is nan, the gradient norm ")
        assert "the weights were not moved, and the last checkpoint is intact" in got["ended"]
        places = answered[0][f"{name}-stop"]["guard"][0]["places"]
        assert len(places) == 4 and f"Rows of the step: {', '.join(places)}. " in got["ended"]
        assert "set guard.non_finite=skip" in got["ended"]
        assert got["checkpoints"] == ["step-00000002"]
    lines = answered[0][f"{name}-stop"]["metrics"]
    assert [line.get("skipped") for line in lines] == [None, None, "non_finite"]
    assert answered[0][f"{name}-stop"]["guard"][0]["loss"] is None


@THREE
def test_after_a_stop_the_run_goes_on_from_the_checkpoint(name: str, answered: list[dict[str, Any]]) -> None:
    for rank in answered:
        got, want = rank[f"{name}-stop-again"], rank[f"{name}-stop-without"]
        assert got["ended"] == "done" and got["hashes"] == want["hashes"][2:]
    # The line of the lost step 3 is gone with that step.
    assert [line["step"] for line in answered[0][f"{name}-stop-again"]["guard"]] == [5]
    assert [line["step"] for line in answered[0][f"{name}-stop-again"]["metrics"]] == [1, 2, 3, 4, 5, 6]


@THREE
def test_too_many_in_a_row_end_the_run(name: str, answered: list[dict[str, Any]]) -> None:
    for rank in answered:
        got = rank[f"{name}-in-a-row"]
        assert got["ended"].startswith("TrainingError: step 4: ")
        assert "It is number 3 of the steps refused in a row (guard.max_skips=2)" in got["ended"]
        assert len(set(got["hashes"])) == 1
    assert [line["action"] for line in answered[0][f"{name}-in-a-row"]["guard"]] == ["skip", "skip", "stop"]


@pytest.fixture(scope="module")
def spiked(folder: Path) -> list[dict[str, Any]]:
    """A gradient a thousand times too large in step 6 of 7, straight and after a resume at step 5."""
    runs: dict[str, Any] = {}
    for name in ("ddp-fp32", "zero3-fp32"):
        common = {"rows": ROWS, "strikes": {"6": 1000.0}, "overrides": [
            *overrides_of(name), "schedule.max_steps=7", "guard.spike=skip", "guard.spike_z=30",
            "guard.spike_window_steps=5"]}
        runs[name] = common
        runs[f"{name}-calm"] = common | {"strikes": {}}
        runs[f"{name}-off"] = common | {"overrides": [*common["overrides"], "guard.spike=off"]}
        runs[f"{name}-first"] = common | {"folder": f"{name}-resumed",
                                          "overrides": [*common["overrides"], "run.stop_after=5"]}
        runs[f"{name}-second"] = common | {"folder": f"{name}-resumed"}
    return spawned(folder, runs, "spiked")


@pytest.mark.parametrize("name", ["ddp-fp32", "zero3-fp32"])
def test_a_spike_is_seen_before_it_moves_anything(name: str, spiked: list[dict[str, Any]]) -> None:
    for rank in spiked:
        assert rank[name]["hashes"][5] == rank[name]["hashes"][4]
        assert rank[f"{name}-off"]["hashes"][5] != rank[f"{name}-off"]["hashes"][4]
        assert rank[f"{name}-calm"]["hashes"][:5] == rank[name]["hashes"][:5]
        # The history is part of the checkpoint: with an empty one, nothing would be a spike yet.
        assert rank[f"{name}-second"]["hashes"] == rank[name]["hashes"][5:]
    line = spiked[0][name]["guard"][0]
    assert (line["step"], line["kind"], line["action"]) == (6, "spike", "skip") and line["z"] > 30
    assert line["grad_norm"] > 100 * max(norm for norm in spiked[0][name]["norms"][:5])
    assert spiked[0][f"{name}-second"]["guard"] == spiked[0][name]["guard"]
    assert spiked[0][f"{name}-calm"]["guard"] == [] == spiked[0][f"{name}-off"]["guard"]


@pytest.fixture(scope="module")
def empty(folder: Path) -> list[dict[str, Any]]:
    """The rows of step 2 carry no supervised token, in every strategy."""
    _, second = reference.batches(8, reference.Settings(examples_per_step=4, epochs=1))
    rows = [tiny_row(6, 0, n) if n in second else ROWS[n] for n in range(8)]
    return spawned(folder, {name: {"rows": rows, "overrides": overrides_of(name)} for name in NAMES}, "empty")


@pytest.mark.parametrize("name", NAMES)
def test_b20_a_window_without_a_target_takes_no_step(name: str, empty: list[dict[str, Any]]) -> None:
    for rank in empty:
        assert rank[name]["ended"] == "done" and rank[name]["hashes"][1] == rank[name]["hashes"][0]
        assert len(set(rank[name]["hashes"])) == 5
    lines, guard = empty[0][name]["metrics"], empty[0][name]["guard"]
    assert [line.get("skipped") for line in lines] == [None, "no_target", None, None, None, None]
    assert "loss" not in lines[1] and lines[1]["supervised_tokens"] == 0 and lines[1]["tokens"] == 24
    assert [(line["step"], line["kind"], line["action"], line["loss"]) for line in guard] == [
        (2, "no_target", "skip", None)]


@pytest.fixture(scope="module")
def halves(folder: Path) -> list[dict[str, Any]]:
    """fp16: calm, one overflow in step 3, and a gradient that is never finite in step 3; a stop after step 4."""
    runs: dict[str, Any] = {}
    for split in ("ddp", "zero1", "zero2", "zero3"):
        common = {"rows": ROWS, "overrides": [*overrides_of(f"{split}-fp16"), "guard.non_finite=skip"]}
        runs[split] = common
        runs[f"{split}-once"] = common | {"strikes": {"3": "once inf"}}
        runs[f"{split}-never"] = common | {"strikes": {"3": "inf"}}
        runs[f"{split}-without"] = common | {"omit": [3]}
        runs[f"{split}-first"] = common | {"folder": f"{split}-stopped", "strikes": {"3": "once inf"},
                                           "overrides": [*common["overrides"], "run.stop_after=4"]}
        runs[f"{split}-second"] = common | {"folder": f"{split}-stopped"}
    runs["fp32"] = {"rows": ROWS, "overrides": overrides_of("ddp-fp32")}
    return spawned(folder, runs, "halves")


FP16 = pytest.mark.parametrize("split", ["ddp", "zero1", "zero2", "zero3"])


def losses_of(run: dict[str, Any]) -> list[float]:
    return [line["loss"] for line in run["metrics"] if "loss" in line]


@FP16
def test_fp16_follows_fp32(split: str, halves: list[dict[str, Any]]) -> None:
    assert losses_of(halves[0][split]) == pytest.approx(losses_of(halves[0]["fp32"]), rel=5e-3)
    assert losses_of(halves[0][split]) != losses_of(halves[0]["fp32"])
    assert [line["loss_scale"] for line in halves[0][split]["metrics"]] == [2.0 ** 10] * 6
    assert all("loss_scale" not in line for line in halves[0]["fp32"]["metrics"])


@FP16
def test_an_overflow_halves_the_scale_and_loses_no_batch(split: str, halves: list[dict[str, Any]]) -> None:
    for rank in halves:
        got = rank[f"{split}-once"]
        assert got["again"] == [[3, "overflow"]] and got["ended"] == "done"
        # Powers of two: half the scale is exactly the same step, wherever nothing falls below fp16's range.
        assert got["norms"] == pytest.approx(rank[split]["norms"], rel=1e-3)
    assert halves[0][f"{split}-once"]["guard"] == []
    assert [line["loss_scale"] for line in halves[0][f"{split}-once"]["metrics"]] == [2.0 ** 10] * 2 + [2.0 ** 9] * 4
    assert losses_of(halves[0][f"{split}-once"]) == pytest.approx(losses_of(halves[0][split]), rel=1e-3)


@FP16
def test_only_at_the_smallest_scale_is_it_the_guards_business(split: str, halves: list[dict[str, Any]]) -> None:
    for rank in halves:
        got = rank[f"{split}-never"]
        assert got["again"] == [[3, "overflow"]] * 10
        assert got["hashes"] == rank[f"{split}-without"]["hashes"]
    assert [line["step"] for line in halves[0][f"{split}-never"]["guard"]] == [3]
    # The scale was not to blame, so it is what it was.
    assert [line["loss_scale"] for line in halves[0][f"{split}-never"]["metrics"]][3:] == [2.0 ** 10] * 3


@FP16
def test_the_scale_is_part_of_the_checkpoint(split: str, halves: list[dict[str, Any]]) -> None:
    for rank in halves:
        assert rank[f"{split}-second"]["hashes"] == rank[f"{split}-once"]["hashes"][4:]
    assert halves[0][f"{split}-second"]["metrics"][-1]["loss_scale"] == 2.0 ** 9
