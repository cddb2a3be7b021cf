"""What ranks run for the tests of resuming, adapters and export."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from safetensors.torch import load_file

from dist.bodies import running, whole_weights
from shardwise.checkpoint import layout
from shardwise.errors import Stopped, UserError
from shardwise.export.runs import read_metrics
from shardwise.model.load import fresh_folder
from shardwise.train import loop, setup
from shardwise.train.evaluate import Score
from shardwise.train.loop import train
from shardwise.train.results import export, take_best

TINY = "recipes/tiny.yaml"


def one_run(overrides: list[str], *, publish: bool = False) -> dict[str, Any]:
    """Train to the end or to a stop; returns metrics, the largest weights' exact bytes, and how it ended."""
    with running(TINY, overrides) as parts:
        try:
            step = train(parts)
            ended = "done"
        except Stopped as stop:
            ended, step = str(stop), parts.resolved.config.run.stop_after
        if publish:
            export(parts, parts.folder / "final", step=step)
        parts.saver.settle()
        weights = whole_weights(parts)
        lines = read_metrics(parts.folder / "metrics.jsonl") if parts.ranks.main else []
        kept = ("step", "loss", "grad_norm", "lr", "supervised_tokens", "eval_loss")
        return {"ended": ended, "start_step": parts.start_step,
                "metrics": [{key: line[key] for key in kept if key in line} for line in lines],
                "weights": {} if weights is None else weights}


def straight_and_resumed(args: dict[str, Any], folder: Path) -> dict[str, Any]:
    """For each named configuration: 6 steps straight, and 3 + a stop + 3."""
    results = {}
    for name, overrides in args["runs"].items():
        common = [*overrides, "schedule.max_steps=6"]
        straight = one_run([*common, f"run.output_dir={folder / name}-straight"])
        first = one_run([*common, f"run.output_dir={folder / name}-resumed", "run.stop_after=3"])
        second = one_run([*common, f"run.output_dir={folder / name}-resumed"])
        same = {key: torch.equal(value, second["weights"][key]) for key, value in straight["weights"].items()}
        results[name] = {"straight": straight["metrics"], "resumed": second["metrics"], "ended": first["ended"],
                         "start_step": second["start_step"], "tensors": len(same),
                         "unequal": [key for key, equal in same.items() if not equal]}
    return results


def adapters(args: dict[str, Any], folder: Path) -> dict[str, Any]:
    """LoRA on a base model in each strategy, published; returns what lies in final/ and the metrics."""
    results = {}
    for name, overrides in args["runs"].items():
        run = one_run([*overrides, f"run.output_dir={folder / name}"], publish=True)
        final = folder / name / "final" / "adapter_model.safetensors"
        checkpoint = next((folder / name / "checkpoints").glob("step-*"))
        results[name] = {"metrics": run["metrics"], "shapes": {k: list(v.shape) for k, v in load_file(final).items()},
                         "checkpoint_bytes": sum(f.stat().st_size for f in checkpoint.rglob("*.pt")) +
                         sum(f.stat().st_size for f in checkpoint.rglob("*.safetensors"))}
    return results


def refused(args: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The message each named configuration is refused with ("" when it was not)."""
    messages = {}
    for name, overrides in args["runs"].items():
        messages[name] = ""
        try:
            with running(TINY, overrides):
                pass
        except UserError as error:
            messages[name] = str(error)
    return messages


def publish(args: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Train and publish final/ in each configuration."""
    return {name: one_run([*overrides, f"run.output_dir={folder / name}"], publish=True)["ended"]
            for name, overrides in args["runs"].items()}


def tracked(args: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Train with wandb in each configuration; returns its run id and how many metrics lines were written."""
    results = {}
    for name, (overrides, env) in args["runs"].items():
        os.environ.update(env)
        with running(TINY, overrides) as parts:
            with contextlib.suppress(Stopped):
                train(parts)
            if parts.metrics is not None:
                parts.metrics.tracker.finish()
                results[name] = {"id": parts.metrics.tracker.run_id, "alive": parts.metrics.tracker.alive,
                                 "lines": len(read_metrics(parts.folder / "metrics.jsonl"))}
        for key in env:
            os.environ.pop(key)
    return results


def gone_on(args: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Train each configuration; its metrics, and those of a run that lies in a folder already."""
    results = {"straight": read_metrics(Path(args["straight"]) / "metrics.jsonl")}
    for name, overrides in args["runs"].items():
        with running(TINY, [*overrides, f"run.output_dir={folder / name}"]) as parts:
            train(parts)
        results[name] = read_metrics(folder / name / "metrics.jsonl")
    return results


def scored(args: dict[str, Any], folder: Path) -> dict[str, Any]:
    """A run whose evaluations say what each rank is told, to the end and once more; the step each start ended at."""
    rank = int(os.environ["RANK"])
    losses, steps, again = iter(args["losses"][rank]), [], ""
    overrides = [*args["overrides"], f"run.output_dir={folder}/run"]

    def told(parts: Any, step: int) -> Score:
        return Score({"step": step, "eval_loss": next(losses), "eval_perplexity": 1.0, "eval_tokens": 1}, [])

    for start in range(2):
        with patch.object(loop, "score_held_out", told), running(TINY, overrides) as parts:
            steps.append(parts.start_step)
            if start and parts.best.exhausted:
                again = "nothing to do"
            train(parts)
            if not start:
                export(parts, parts.folder / "final", step=take_best(parts))
                newest = layout.latest(parts.folder / "checkpoints")
                assert newest is not None
                steps[-1] = layout.step_of(newest)
    return {"steps": steps, "again": again}


def loaded(args: dict[str, Any], folder: Path) -> dict[str, Any]:
    """What a rank holds of a zero3 model right after it was loaded, and whether the whole equals the file."""
    import deepspeed

    seen: dict[str, Any] = {}
    real = setup.load_model

    def load_model(resolved: Any, **more: Any) -> Any:
        model = real(resolved, **more)
        file = load_file(fresh_folder(resolved) / "model.safetensors")
        parts = dict(model.named_parameters())
        seen.update(held=sum(p.ds_tensor.numel() for p in parts.values()), unequal=[], compared=0,
                    whole={name: p.numel() for name, p in parts.items()},
                    shapes={name: list(p.ds_shape) for name, p in parts.items()})
        for name, p in parts.items():
            with deepspeed.zero.GatheredParameters([p]):
                seen["unequal"] += [name] if not torch.equal(p.detach(), file[name]) else []
                seen["compared"] += 1
        return model

    overrides = ["strategy=zero3", f"run.output_dir={folder}/run"]
    with patch.object(setup, "load_model", load_model), running(TINY, overrides):
        return seen
