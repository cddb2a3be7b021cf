"""Global step -> example ids -> each rank's micro-batches. Pure functions; the hardware enters only in `split`.

A `Window` is one optimizer step's work: `window[rank][micro]` is a list of rows, a row a list of example ids
(several when packed, one when padded). Every rank has the same number of micro-batches, because collectives
need it; an empty micro-batch becomes an all-ignored filler row (data/steps/batch.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from shardwise.data.steps.packing import Row, packed, padded
from shardwise.errors import DataError

MicroBatch = list[Row]
Window = list[list[MicroBatch]]
Sources = tuple[tuple[int, float], ...]
"""(examples, weight) of each source of a data set, whose ids are consecutive: weight 2 is seen twice an epoch."""
FILLER_TOKENS = 2
"""Tokens of an empty micro-batch's filler row."""


@lru_cache(maxsize=2)
def epoch_order(seed: int, epoch: int, parts: Sources) -> np.ndarray:
    """Example ids of one epoch in their order: int64 [epoch_examples(parts, epoch)], the same on every machine."""
    first = np.cumsum([0, *(examples for examples, _ in parts)])
    ids = np.concatenate([first[source] + _drawn(seed, source, epoch, part) for source, part in enumerate(parts)])
    # Sorted, so that the order depends on what is in the epoch and not on how it was drawn.
    return np.sort(ids)[np.random.Generator(np.random.PCG64([seed, epoch])).permutation(len(ids))]


def _drawn(seed: int, source: int, epoch: int, part: tuple[int, float]) -> np.ndarray:
    """A source's share of an epoch, ids from 0: the next piece of its permutations, one after another forever."""
    size, pieces = part[0], [np.empty(0, np.int64)]
    at, end = _seen(part, epoch), _seen(part, epoch + 1)
    while at < end:
        turn, place = divmod(at, size)
        stop = min(size, place + end - at)
        # The closing 1 keeps these streams apart from those of the epochs, whose seeds are [seed, epoch].
        whole = place == 0 and stop == size
        order = np.arange(size) if whole else np.random.Generator(
            np.random.PCG64([seed, source, turn, 1])).permutation(size)
        pieces.append(order[place:stop])
        at += stop - place
    return np.concatenate(pieces)


def _seen(part: tuple[int, float], epoch: int) -> int:
    """Examples of a source that lie before this epoch."""
    return round(epoch * (part[1] * part[0]))


def epoch_examples(parts: Sources, epoch: int) -> int:
    """Examples of an epoch; with fractional weights it varies by rounding."""
    return sum(_seen(part, epoch + 1) - _seen(part, epoch) for part in parts)


@lru_cache(maxsize=32)
def _ends(parts: Sources, examples_per_step: int, epochs: int) -> np.ndarray:
    """Steps up to the end of each of the first epochs: int64 [epochs]."""
    numbers = np.arange(epochs + 1)
    seen = sum((np.rint(numbers * (weight * examples)) for examples, weight in parts), np.zeros(epochs + 1))
    return np.cumsum(-(-np.diff(seen.astype(np.int64)) // examples_per_step))


def epoch_of(step: int, parts: Sources, examples_per_step: int) -> tuple[int, int, int]:
    """(epoch, place in it, steps of it) of optimizer step `step`; the first two count from 0."""
    sizes = [float(weight * examples) for examples, weight in parts]
    assert any(sizes), "there is no example to train on"
    if all(size.is_integer() for size in sizes):  # every epoch has as many
        steps = math.ceil(sum(sizes) / examples_per_step)
        return *divmod(step, steps), steps
    epochs = 64
    while (ends := _ends(parts, examples_per_step, epochs))[-1] <= step:
        epochs *= 2
    epoch = int(np.searchsorted(ends, step, side="right"))
    first = int(ends[epoch - 1]) if epoch else 0
    return epoch, step - first, int(ends[epoch]) - first


def epochs_done(step: int, parts: Sources, examples_per_step: int) -> float:
    """Passes over the data after `step` optimizer steps."""
    epoch, place, steps = epoch_of(step, parts, examples_per_step)
    return epoch + place / steps


def global_batch(*, seed: int, step: int, parts: Sources, examples_per_step: int) -> list[int]:
    """Example ids of optimizer step `step` (from 0). The last step of an epoch may be shorter."""
    epoch, place, _ = epoch_of(step, parts, examples_per_step)
    order = epoch_order(seed, epoch, parts)
    ids: list[int] = order[place * examples_per_step:(place + 1) * examples_per_step].tolist()
    return ids


def split(ids: Sequence[int], lengths: np.ndarray, *, world_size: int, max_tokens: int, packing: bool) -> Window:
    """Share the examples of one step among ranks and micro-batches of at most `max_tokens` tokens each.

    `lengths[id]` is an example's token count. Every id appears as often as it is listed. Micro-batches are ordered by
    cost, the dearest first, and the i-th ones of all ranks are alike, so that ranks wait little for each
    other. Raises DataError when one example alone is longer than `max_tokens`.
    """
    longest_first = sorted(zip((-lengths[np.asarray(ids, np.int64)]).tolist(), ids, strict=True))
    sized = [(-negative, example) for negative, example in longest_first]
    if sized and sized[0][0] > max_tokens:
        raise DataError(f"example {sized[0][1]} has {sized[0][0]:,} tokens, more than "
                        f"batch.max_tokens_per_micro_batch={max_tokens:,}; raise that, or lower data.max_length")
    if packing:
        bins = [[row] if row else [] for row in packed(sized, world_size, max_tokens)]
    else:
        bins = [[[example] for example in group] for group in padded(sized, world_size, max_tokens)]
    return _dealt(bins, lengths, world_size)


def _dealt(bins: list[MicroBatch], lengths: np.ndarray, world_size: int) -> Window:
    """Dearest first, one to each rank in every turn, the dearest of a turn to the rank with the least so far.

    So the totals of two ranks differ by no more than two micro-batches of one and the same turn do.
    """
    costs = [cost(micro, lengths) for micro in bins]
    order = sorted(range(len(bins)), key=lambda b: (-costs[b], b))
    window: Window = [[] for _ in range(world_size)]
    total = [0] * world_size
    for turn in range(0, len(order), world_size):
        ranks = sorted(range(world_size), key=lambda rank: (total[rank], rank))
        for rank, place in zip(ranks, order[turn:turn + world_size], strict=True):
            window[rank].append(bins[place])
            total[rank] += costs[place]
    return window


def cost(micro: MicroBatch, lengths: np.ndarray) -> int:
    """Tokens of a micro-batch, the padding of shorter rows included."""
    widths = [sum(int(lengths[i]) for i in row) for row in micro]
    return len(widths) * max(widths, default=0)


def rounded(size: int) -> int:
    """The next of a few sizes: multiples of 8, from 256 on of a sixteenth of the power of two below.

    Kernels are compiled or chosen per shape and memory is kept per shape; when every micro-batch had a shape
    of its own, that cost up to half the speed on a CPU. At most 1/16 is added, 1/32 on average.
    """
    step = max(8, 1 << max(0, (size - 1).bit_length() - 5))
    return -(-size // step) * step


def computed_width(width: int, *, rows: int, max_tokens: int) -> int:
    """Tokens per row that are computed for rows of up to `width`: rounded up as far as `max_tokens` allows."""
    return max(width, min(rounded(width), max_tokens // max(1, rows)))


def computed_tokens(window: Window, lengths: np.ndarray, *, max_tokens: int) -> int:
    """Tokens that all ranks compute for a window, padding and filler rows included."""
    total = 0
    for micro in (micro for share in window for micro in share):
        widths = [sum(int(lengths[i]) for i in row) for row in micro]
        total += len(micro) * computed_width(max(widths), rows=len(micro), max_tokens=max_tokens) if micro \
            else FILLER_TOKENS
    return total
