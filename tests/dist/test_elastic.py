"""Saved by any strategy on any number of ranks, gone on with by any other: the curve of the run that never stopped."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from dist.harness import spawn

STRATEGIES = {"ddp": ["strategy=ddp"], "zero1": ["strategy=zero1"], "zero2": ["strategy=zero2"],
              "zero3": ["strategy=zero3"], "zero2-offload": ["strategy=zero2", "offload=optimizer"],
              "zero3-offload": ["strategy=zero3", "offload=params"]}
COMMON = ["batch.examples_per_step=6", "batch.max_tokens_per_micro_batch=400", "data.max_length=400",
          "schedule.max_steps=4", "data.eval=[]"]
STOP = 2
ASYNC = [f"checkpoint.every_steps={STOP}", "checkpoint.async_save=true"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("elastic")


@pytest.fixture(scope="module")
def saved(folder: Path) -> dict[tuple[str, int], Path]:
    """(strategy, ranks) -> a checkpoint of step STOP; and the run that never stopped, as ("straight", 1)."""
    places = {}
    for ranks in (1, 2):
        runs = {f"{name}x{ranks}": [*COMMON, *words, f"run.stop_after={STOP}"] for name, words in STRATEGIES.items()}
        if ranks == 1:
            runs["straight"] = [*COMMON, "strategy=ddp"]
            runs |= {f"{name}-asyncx1": [*COMMON, *STRATEGIES[name], *ASYNC] for name in ("ddp", "zero3")}
        else:
            runs |= {f"{name}-asyncx2": [*COMMON, *STRATEGIES[name], *ASYNC] for name in ("ddp", "zero1", "zero3")}
        spawn("dist.bodies_resume:publish", world_size=ranks, args={"runs": runs}, folder=folder, timeout_s=180)
        places |= {(name, ranks): folder / f"{name}x{ranks}" / "checkpoints" / f"step-{STOP:08d}"
                   for name in STRATEGIES}
    return places


@pytest.mark.parametrize(("there", "here"), [(2, 1), (1, 2), (2, 2)])
def test_b36_every_pairing_goes_on_with_the_same_curve(folder: Path, saved: dict[tuple[str, int], Path], there: int,
                                                   here: int) -> None:
    pairs = [(a, b) for a, b in itertools.product(STRATEGIES, STRATEGIES) if there != here or a != b]
    runs = {f"{a}x{there}-{b}x{here}": [*COMMON, *STRATEGIES[b], f"checkpoint.resume={saved[a, there]}"]
            for a, b in pairs}
    lines = spawn("dist.bodies_resume:gone_on", world_size=here, folder=folder, timeout_s=280, args={
        "straight": str(folder / "straight"), "runs": runs})[0]
    same_curve(lines, runs)


def same_curve(lines: dict[str, Any], names: Iterable[str]) -> None:
    expected = [line for line in lines["straight"] if line["step"] > STOP]
    assert len(expected) == 2
    for name in names:
        assert [line["step"] for line in lines[name]] == [3, 4], name
        for got, want in zip(lines[name], expected, strict=True):
            assert got["examples"] == want["examples"] and got["lr"] == want["lr"], name
            for key in ("loss", "grad_norm"):
                assert got[key] == pytest.approx(want[key], rel=1e-5), (name, key)


@pytest.mark.parametrize(("name", "ranks"), [("ddp", 1), ("zero3", 1), ("ddp", 2), ("zero1", 2), ("zero3", 2)])
def test_what_was_saved_beside_training_is_of_its_step(folder: Path, saved: dict[tuple[str, int], Path], name: str,
                                                       ranks: int) -> None:
    """The run that saved it went on at once; what lies there is what was true when it was asked for."""
    place = folder / f"{name}-asyncx{ranks}" / "checkpoints" / f"step-{STOP:08d}"
    runs = {f"{name}x{ranks}-behind": [*COMMON, *STRATEGIES[name], f"checkpoint.resume={place}"]}
    lines = spawn("dist.bodies_resume:gone_on", world_size=ranks, folder=folder, timeout_s=60, args={
        "straight": str(folder / "straight"), "runs": runs})[0]
    same_curve(lines, runs)


def test_examples_are_those_of_the_run_that_never_stopped(saved: dict[tuple[str, int], Path]) -> None:
    """The data order is a function of the step alone, so a checkpoint holds nothing of it that could be lost."""
    import json

    for place in saved.values():
        assert json.loads((place / "meta.json").read_text())["feed"] == {}


def test_what_is_on_disk_does_not_depend_on_the_split(saved: dict[tuple[str, int], Path]) -> None:
    import torch

    from shardwise.checkpoint.slices import Saved, Slice

    whole: dict[tuple[str, int], dict[str, Any]] = {}
    for key, place in saved.items():
        saved_there = Saved(place / "state")
        whole[key] = {name: torch.full((size,), float("nan")) for name, size in saved_there.sizes.items()}
        saved_there.read({name: Slice(tensor, tensor.numel(), 0) for name, tensor in whole[key].items()})
    names = whole["ddp", 1].keys()
    assert {name.partition("/")[0] for name in names} == {"weight", "exp_avg", "exp_avg_sq", "step"}
    for key, tensors in whole.items():
        assert tensors.keys() == names, key
        for name, tensor in tensors.items():
            torch.testing.assert_close(tensor, whole["ddp", 1][name], rtol=2e-4, atol=3e-6, msg=f"{key} {name}")
