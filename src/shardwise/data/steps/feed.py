"""Optimizer step -> the examples of its global batch, from stored or from streamed data."""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from shardwise.data.steps.stream import Cursor, Example, Stream
from shardwise.data.steps.windows import epochs_done, global_batch
from shardwise.data.store.examples import Examples

STEPS_AHEAD = 2


class Rows(Protocol):
    """What a step needs to know of examples, by number."""

    @property
    def lengths(self) -> np.ndarray:
        """int32 [n], tokens."""

    @property
    def supervised(self) -> np.ndarray:
        """int32 [n], tokens that carry loss."""

    @property
    def target_weight(self) -> np.ndarray:
        """float64 [n], sum of their loss weights."""

    def get(self, ids: Sequence[int]) -> list[tuple[np.ndarray, np.ndarray]]:
        """(token ids int32 [T], loss weights float32 [T]) of each."""

    def place(self, i: int) -> str:
        """FILE:LINE of one."""


class Feed(Protocol):
    """Hands out global batches in the order of steps."""

    def batch(self, step: int) -> tuple[Rows, list[int]]:
        """Examples, and which of them optimizer step `step` (from 0) trains on, in order. Steps come in order."""

    def epochs(self, done: int) -> float:
        """Passes over the data after `done` steps, the last ones handed out."""

    def state(self) -> dict[str, Any]:
        """What a checkpoint must keep to go on behind the last batch handed out."""

    def dropped(self) -> dict[str, int]:
        """Rows left out on the way, by kind of fault; those of stored data were counted before."""


class StoredFeed:
    """Any step's batch is a function of the seed and the step alone."""

    def __init__(self, examples: Examples, *, seed: int, examples_per_step: int) -> None:
        self.examples, self.seed, self.examples_per_step = examples, seed, examples_per_step

    def batch(self, step: int) -> tuple[Rows, list[int]]:
        """See Feed."""
        return self.examples, global_batch(seed=self.seed, step=step, parts=self.examples.parts,
                                           examples_per_step=self.examples_per_step)

    def epochs(self, done: int) -> float:
        """See Feed."""
        return epochs_done(done, self.examples.parts, self.examples_per_step)

    def state(self) -> dict[str, Any]:
        """Nothing: the step says it all."""
        return {}

    def dropped(self) -> dict[str, int]:
        """Nothing more."""
        return {}


class HeldRows:
    """Examples in memory."""

    def __init__(self, examples: Sequence[Example]) -> None:
        self.examples = examples
        self.lengths = np.asarray([len(e.encoded.ids) for e in examples], np.int32)
        self.supervised = np.asarray([np.count_nonzero(e.encoded.weights) for e in examples], np.int32)
        self.target_weight = np.asarray([e.encoded.weights.sum(dtype=np.float64) for e in examples])

    def get(self, ids: Sequence[int]) -> list[tuple[np.ndarray, np.ndarray]]:
        """See Rows."""
        return [self.examples[i].encoded[:2] for i in ids]

    def place(self, i: int) -> str:
        """See Rows."""
        return self.examples[i].place


class _Step(NamedTuple):
    rows: HeldRows
    after: Cursor


class StreamFeed:
    """The next examples of a stream; a thread reads ahead while the model computes."""

    def __init__(self, stream: Stream, *, examples_per_step: int, state: dict[str, Any] | None = None) -> None:
        self.cursor = Cursor(**(state or {}).get("stream", {}))
        self.examples_per_step = examples_per_step
        self._stream = stream
        stream.dropped.clear()  # a look at its first rows may have counted some
        self._ready: queue.Queue[_Step | BaseException] = queue.Queue(STEPS_AHEAD)
        threading.Thread(target=self._read, args=(stream, self.cursor), daemon=True).start()

    def _read(self, stream: Stream, cursor: Cursor) -> None:
        try:
            some: list[Example] = []
            for example in stream.examples(cursor):
                if example is not None:
                    some.append(example)
                if some and (example is None or len(some) == self.examples_per_step):
                    # At the end of an epoch the batch is shorter, and the next one begins the next epoch.
                    after = some[-1].after if example is not None else Cursor(cursor.epoch + 1)
                    self._ready.put(_Step(HeldRows(some), after))
                    some = []
                if example is None:
                    cursor = Cursor(cursor.epoch + 1)
        except BaseException as error:  # whatever it is, the loop must learn of it
            self._ready.put(error)

    def batch(self, step: int) -> tuple[Rows, list[int]]:
        """See Feed."""
        ready = self._ready.get()
        if isinstance(ready, BaseException):
            self._ready.put(ready)  # nothing else will come, should anyone ask again
            raise ready
        self.cursor = ready.after
        return ready.rows, list(range(len(ready.rows.lengths)))

    def epochs(self, done: int) -> float:
        """Whole passes so far; how much of the current one is done is not known."""
        return float(self.cursor.epoch)

    def dropped(self) -> dict[str, int]:
        """See Feed; of the rows read so far in this session, a few steps ahead included."""
        return dict(self._stream.dropped)

    def state(self) -> dict[str, Any]:
        """The cursor."""
        return {"stream": self.cursor._asdict()}
