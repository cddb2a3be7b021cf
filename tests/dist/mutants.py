"""Mistakes that others made, put into the product for one run each, and a counter of DDP's communication."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from dist.bodies import finished, running
from shardwise.train import loop, parts, step
from shardwise.train.engine import DeepSpeedEngine, TorchEngine


def train_mutants(args: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Train every run of `args["runs"]` ({name: [mutant, overrides]})."""
    results = {}
    for name, (mutant, overrides) in args["runs"].items():
        with MUTANTS[mutant](), running(args["recipe"], [*overrides, f"run.output_dir={folder / name}"]) as built:
            loop.train(built)
            results[name] = finished(built, folder / f"{name}.safetensors")
    return results


@contextlib.contextmanager
def _losses_scaled(factor: Callable[[Any, Any, dict[str, Any]], float]) -> Iterator[None]:
    """Each micro-batch's summed loss times `factor(batch, all batches of this rank, the step's numbers)`."""
    real_losses, real_step = step.losses, step.optimizer_step

    def wrong_step(engine: Any, batches: Any, **numbers: Any) -> Any:
        def losses(model: Any, batch: Any, router: Any) -> Any:
            cross_entropy, balance = real_losses(model, batch, router)
            return cross_entropy * factor(batch, batches, numbers), balance

        with patch.object(step, "losses", losses):
            return real_step(engine, batches, **numbers)

    with patch.object(loop, "optimizer_step", wrong_step):
        yield


def mean_of_means() -> contextlib.AbstractContextManager[None]:
    """Every micro-batch divided by its own count, then averaged."""
    return _losses_scaled(lambda batch, batches, numbers: numbers["supervised_tokens"] / (
        numbers["world_size"] * len(batches) * max(1, batch.num_targets)))


def own_count() -> contextlib.AbstractContextManager[None]:
    """Every rank divides by its own count, and the ranks are averaged."""
    return _losses_scaled(lambda batch, batches, numbers: numbers["supervised_tokens"] / (
        numbers["world_size"] * max(1, sum(b.num_targets for b in batches))))


def divided_twice() -> contextlib.AbstractContextManager[None]:
    """The global count used, but the mean over ranks not undone."""
    return _losses_scaled(lambda batch, batches, numbers: 1.0 / numbers["world_size"])


@contextlib.contextmanager
def step_every_micro_batch() -> Iterator[None]:
    """Accumulation that does not accumulate: each micro-batch is a boundary and moves the weights."""
    rate: list[float] = []
    real_step = step.optimizer_step

    def remember(engine: Any, batches: Any, **numbers: Any) -> Any:
        rate[:] = [numbers["lr"]]
        return real_step(engine, batches, **numbers)

    def wrong(kind: Any) -> Any:
        real = kind.micro_step

        def micro_step(self: Any, loss: Any, *, last: bool) -> None:
            real(self, loss, last=True)
            if not last:
                self.apply(rate[0])

        return patch.object(kind, "micro_step", micro_step)

    with patch.object(loop, "optimizer_step", remember), wrong(TorchEngine), wrong(DeepSpeedEngine):
        yield


@contextlib.contextmanager
def packed_without_borders() -> Iterator[None]:
    """Packed examples that see the ones before them."""
    real = parts.make_batch

    def make_batch(*args: Any, **more: Any) -> Any:
        batch = real(*args, **more)
        return dataclasses.replace(batch, position_ids=torch.arange(batch.input_ids.shape[1]).expand_as(
            batch.input_ids))

    with patch.object(parts, "make_batch", make_batch):
        yield


MUTANTS: dict[str, Callable[[], contextlib.AbstractContextManager[None]]] = {
    "none": contextlib.nullcontext, "mean_of_means": mean_of_means, "own_count": own_count,
    "divided_twice": divided_twice, "step_every_micro_batch": step_every_micro_batch,
    "packed_without_borders": packed_without_borders,
}


def count_communication(args: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Train a ddp run with DDP's own hook counted: {calls, steps, micro_batches}; gradients go to a file per rank.

    With `args["no_sync"]` false, no_sync is taken out, to show that the hook counts.
    """
    calls: list[int] = []
    gradients: dict[str, torch.Tensor] = {}

    def hook(state, bucket):  # without annotations: DDP refuses ones that are text, as they are in this file
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

        calls.append(bucket.index())
        return allreduce_hook(None, bucket)

    with running(args["recipe"], [*args["overrides"], f"run.output_dir={folder / 'run'}"]) as built:
        model = built.engine.model
        model.register_comm_hook(None, hook)

        def keep(optimizer: Any, *rest: Any) -> None:
            done = len({name.partition("/")[0] for name in gradients})
            for name, parameter in built.engine.module.named_parameters():
                gradients[f"{done}/{name}"] = parameter.grad.clone()

        built.engine.optimizer.register_step_pre_hook(keep)
        if not args["no_sync"]:
            model.no_sync = contextlib.nullcontext
        micro_batches = 0
        for index in range(built.plan.num_steps):
            micro_batches += len(built.step_data(index).batches)
        loop.train(built)
    from safetensors.torch import save_file

    save_file(gradients, folder / f"gradients-{built.ranks.rank}.safetensors")
    return {"calls": len(calls), "buckets": len(set(calls)), "steps": built.plan.num_steps,
            "micro_batches": micro_batches}
