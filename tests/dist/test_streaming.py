"""Streamed data: the same steps on every split, a stop and a start change nothing, and slow rows time nothing out."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dist.given import CHATS, said, write_chats, write_texts
from dist.harness import _World, spawn

STEPS = 7
"""21 rows by 8: 8, 8 and 5 of each epoch, so two epochs and one step."""
COMMON = ["data.streaming=true", f"schedule.max_steps={STEPS}", "batch.examples_per_step=8", "data.max_length=128",
          "data.on_fault.empty_turn=report"]
PIECES = 700
"""Bytes of a piece of a file: 8 of them, so two groups of rows that are shuffled together."""
SPLITS = {
    1: {"ddp-packed": ["batch.max_tokens_per_micro_batch=128"], "ddp-padded": ["data.packing=false"],
        "ddp-large": ["batch.max_tokens_per_micro_batch=1024"]},
    2: {"ddp": [], "zero2": ["strategy=zero2"],
        "zero2-padded": ["strategy=zero2", "data.packing=false", "batch.max_tokens_per_micro_batch=300"]},
}
STOPS = [("sft", "ddp", 4), ("sft", "ddp", 6), ("sft", "zero2", 4), ("pretrain", "ddp", 4)]
"""On two ranks: task, split, and the step after which a run stops and is started again."""
Results = dict[str, Any]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    folder = tmp_path_factory.mktemp("streaming")
    chats = write_chats(folder / "chats.jsonl", CHATS)
    texts = write_texts(folder / "texts.jsonl", [said(count) + "." for count in (3, 40, 1, 22, 17, 90, 2, 31)])
    held_out = write_chats(folder / "held_out.jsonl", [[{"role": "user", "content": f"another {n}"},
                                                        {"role": "assistant", "content": said(n)}] for n in (4, 9)])
    tasks = {"sft": [*COMMON, f"data.train=[{chats}]", f"data.eval=[{held_out}]"],
             "pretrain": [*COMMON, f"data.train=[{texts}]", "data.eval=[]", "data.task=pretrain",
                          "data.max_length=24"]}

    def listed(world: int) -> list[tuple[str, list[str]]]:
        runs = []
        for task, common in tasks.items():
            for name, split in SPLITS[world].items():
                runs.append((f"{task} {world} {name}", [*common, *split, out(f"{task}-{world}-{name}")]))
                for stop in [stop for job, own, stop in STOPS if world == 2 and (job, own) == (task, name)]:
                    where = [*common, *split, out(f"{task}-{world}-{name}-{stop}")]
                    runs.append((f"{task} {world} {name} until {stop}", [*where, f"run.stop_after={stop}"]))
                    runs.append((f"{task} {world} {name} after {stop}", where))
            moved = [*common, out(f"{task}-moved")]
            runs.append((f"{task} moved from 2", [*moved, "run.stop_after=5"]) if world == 2 else
                        (f"{task} moved to 1", moved))
        return runs

    def out(name: str) -> str:
        return f"run.output_dir={folder / name}"

    found: Results = {}
    for world in (2, 1):
        found |= spawn("dist.bodies_streaming:runs", world_size=world, folder=folder / f"world-{world}", timeout_s=240,
                       args={"runs": listed(world), "bytes_per_unit": PIECES})[0]
    return found


def curve(run: dict[str, Any], key: str) -> list[float]:
    return [line[key] for line in run["metrics"] if key in line]


@pytest.mark.parametrize("task", ["sft", "pretrain"])
@pytest.mark.parametrize("name", [f"{world} {name}" for world, splits in SPLITS.items() for name in splits])
def test_every_split_is_the_same_run(results: Results, task: str, name: str) -> None:
    run, base = results[f"{task} {name}"], results[f"{task} 1 ddp-packed"]
    assert run["ended"] == "done" and curve(run, "step") == curve(base, "step")
    assert curve(run, "supervised_tokens") == curve(base, "supervised_tokens")
    for key in ("loss", "grad_norm", "eval_loss"):
        assert curve(run, key) == pytest.approx(curve(base, key), rel=1e-5), key
    assert len(curve(run, "loss")) == STEPS and len(set(curve(run, "loss"))) == STEPS


def test_every_epoch_has_every_row(results: Results) -> None:
    tokens = curve(results["sft 2 ddp"], "supervised_tokens")
    assert sum(tokens[:3]) == sum(tokens[3:6]) and tokens[:3] != tokens[3:6]
    blocks = curve(results["pretrain 2 ddp"], "supervised_tokens")
    assert max(blocks) == 8 * 23 and min(blocks) < 8 * 23


@pytest.mark.parametrize(("task", "name", "stop"), STOPS)
def test_resumed_equals_straight(results: Results, task: str, name: str, stop: int) -> None:
    """To the last bit, from the middle of an epoch (4) and from its end (6)."""
    first, second = (results[f"{task} 2 {name} {which} {stop}"] for which in ("until", "after"))
    assert first["ended"].startswith(f"stopped after step {stop} of {STEPS}") and second["start_step"] == stop
    assert second["metrics"] == results[f"{task} 2 {name}"]["metrics"]


@pytest.mark.parametrize("task", ["sft", "pretrain"])
def test_resumed_on_another_number_of_ranks(results: Results, task: str) -> None:
    moved, straight = results[f"{task} moved to 1"], results[f"{task} 1 ddp-packed"]
    assert results[f"{task} moved from 2"]["ended"].startswith("stopped after step 5") and moved["start_step"] == 5
    assert curve(moved, "step") == curve(straight, "step")
    assert curve(moved, "supervised_tokens") == curve(straight, "supervised_tokens")
    for key in ("loss", "grad_norm"):
        assert curve(moved, key) == pytest.approx(curve(straight, key), rel=1e-5), key


@pytest.fixture
def fresh_ranks() -> Iterator[_World]:
    """Two that have no process group yet, which would bring a time-out of its own, and an empty cache."""
    world = _World(2)
    yield world
    world.end()


def test_tokenising_may_take_longer_than_ranks_wait_for_each_other(tmp_path: Path, fresh_ranks: _World) -> None:
    chats, log = write_chats(tmp_path / "chats.jsonl", CHATS), tmp_path / "log"
    args = {"log": str(log), "slow": 0.4, "overrides": [
        f"data.train=[{chats}]", "data.eval=[]", "data.on_fault.empty_turn=report", "data.max_length=128",
        "schedule.max_steps=2", "launch.timeout_minutes=0.1"]}
    one, other = fresh_ranks.run("dist.bodies_streaming:slow_start", args, tmp_path, 120)
    assert one["ended"] == other["ended"] == "done" and len(curve(one, "loss")) == 2
    assert one["seconds"] > 0.4 * len(CHATS) > 6.0  # the time-out is of 6 s
    assert sorted(log.read_text().splitlines()) == sorted(
        next(turn["content"] for turn in chat) for chat in CHATS)  # and each row was tokenised once
