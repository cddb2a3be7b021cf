"""Everything a run is made of, built once by setup.py and handed to the loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from shardwise.checkpoint.store import Saver
from shardwise.config.resolve import Resolved, StepPlan
from shardwise.data.steps.batch import Batch, make_batch
from shardwise.data.steps.feed import Feed, Rows
from shardwise.data.steps.windows import Window, computed_tokens, split
from shardwise.data.store.examples import Examples
from shardwise.dist import Ranks
from shardwise.train.best import Best
from shardwise.train.engine import Engine
from shardwise.train.guard import Guard
from shardwise.train.inputs import Inputs
from shardwise.train.memory import MicroBatchLimit
from shardwise.train.metrics import Metrics
from shardwise.train.signals import StopRequest


@dataclass(frozen=True)
class StepData:
    """One optimizer step's work for this rank, and the global counts that normalise it."""

    rows: Rows
    ids: list[int]
    """Of the whole global batch, in `rows`."""
    batches: list[Batch]
    examples: int
    supervised_tokens: int
    target_weight: float
    """Sum of the loss weights of the supervised tokens."""
    tokens: int
    padded_tokens: int
    """Tokens computed over all ranks, padding and filler rows included."""

    @property
    def packing_efficiency(self) -> float:
        """Share of the computed tokens that are real ones, 0 to 1."""
        return self.tokens / self.padded_tokens


class Stateful(Protocol):
    """A part that remembers earlier steps."""

    def state(self) -> dict[str, Any]:
        """What it remembers, as JSON can hold it."""

    def load(self, state: dict[str, Any]) -> None:
        """Remember what a checkpoint kept."""


@dataclass
class Parts:
    """The pieces of a run; see setup.py for how each is made."""

    resolved: Resolved
    plan: StepPlan
    ranks: Ranks
    device: torch.device
    engine: Engine
    saver: Saver
    best: Best
    inputs: Inputs
    feed: Feed
    packing: bool
    router: tuple[float, int, int] | None
    autocast: Callable[[], Any]
    metrics: Metrics | None
    stop: StopRequest
    manifest: dict[str, Any]
    start_step: int
    resumed: bool
    evaluation_owed: bool
    """Whether a stop kept the evaluation after `start_step` from being made."""
    guard: Guard
    limit: MicroBatchLimit

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer."""
        return self.inputs.tokenizer

    @property
    def held_out(self) -> Examples | None:
        """What is evaluated on."""
        return self.inputs.held_out

    @property
    def folder(self) -> Path:
        """The run folder."""
        return Path(self.resolved.config.run.output_dir or "")

    @property
    def pad_id(self) -> int:
        """Any token will do where nothing is supervised and nothing is attended."""
        pad = self.tokenizer.pad_token_id
        return int(self.tokenizer.eos_token_id or 0) if pad is None else int(pad)

    def stateful(self) -> dict[str, Stateful]:
        """What of the loop a checkpoint must keep, besides weights, optimizer and feed."""
        found: dict[str, Stateful] = {"guard": self.guard, "best": self.best}
        if self.engine.scale is not None:
            found["loss_scale"] = self.engine.scale
        return found

    def step_data(self, step: int) -> StepData:
        """Work of optimizer step `step` (from 0)."""
        return self.work(*self.feed.batch(step))

    def window(self, examples: Rows, ids: list[int]) -> Window:
        """How some examples are shared out among ranks and micro-batches."""
        return split(ids, examples.lengths, world_size=self.ranks.world_size, packing=self.packing,
                     max_tokens=self.limit.of(examples, ids))

    def batches(self, examples: Rows, window: Window) -> Iterator[Batch]:
        """This rank's micro-batches, made one at a time."""
        limit = self.limit.of(examples, [i for share in window for micro in share for row in micro for i in row])
        for micro in window[self.ranks.rank]:
            yield make_batch(micro, examples, pad_id=self.pad_id, max_tokens=limit).to(self.device)

    def work(self, examples: Rows, ids: list[int]) -> StepData:
        """This rank's share of some examples, with the global counts."""
        window = self.window(examples, ids)
        return StepData(rows=examples, ids=ids, batches=list(self.batches(examples, window)), examples=len(ids),
                        tokens=int(examples.lengths[ids].sum()),
                        padded_tokens=computed_tokens(window, examples.lengths,
                                                      max_tokens=self.limit.of(examples, ids)),
                        supervised_tokens=int(examples.supervised[ids].sum()),
                        target_weight=float(examples.target_weight[ids].sum()))
