"""Global step -> example ids -> each rank's micro-batches. Pure functions; the hardware enters only in `split`.

A `Window` is one optimizer step's work: `window[rank][micro]` is a list of rows, a row a list of example ids
(several when packed, one when padded). Every rank has the same number of micro-batches, because collectives
need it; an empty micro-batch becomes an all-ignored filler row (data/batch.py).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from shardwise.errors import DataError

Row = list[int]
MicroBatch = list[Row]
Window = list[list[MicroBatch]]


@lru_cache(maxsize=2)
def epoch_order(seed: int, epoch: int, examples: int) -> np.ndarray:
    """The order of one epoch: int64 [examples], the same on every machine."""
    return np.random.Generator(np.random.PCG64([seed, epoch])).permutation(examples)


def global_batch(*, seed: int, step: int, examples: int, examples_per_step: int) -> list[int]:
    """Example ids of optimizer step `step` (from 0). The last step of an epoch may be shorter."""
    per_epoch = math.ceil(examples / examples_per_step)
    epoch, place = divmod(step, per_epoch)
    order = epoch_order(seed, epoch, examples)
    return [int(i) for i in order[place * examples_per_step:(place + 1) * examples_per_step]]


def split(ids: Sequence[int], lengths: np.ndarray, *, world_size: int, max_tokens: int, packing: bool) -> Window:
    """Share the examples of one step among ranks and micro-batches of at most `max_tokens` tokens each.

    `lengths[id]` is an example's token count. Every id appears exactly once. Micro-batches are ordered by
    cost, the dearest first, and the i-th ones of all ranks are alike, so that ranks wait little for each
    other. Raises DataError when one example alone is longer than `max_tokens`.
    """
    sized = sorted(((int(lengths[i]), i) for i in ids), key=lambda pair: (-pair[0], pair[1]))
    if sized and sized[0][0] > max_tokens:
        raise DataError(f"example {sized[0][1]} has {sized[0][0]:,} tokens, more than "
                        f"batch.max_tokens_per_micro_batch={max_tokens:,}; raise that, or lower data.max_length")
    bins = (_packed if packing else _padded)(sized, world_size, max_tokens)
    return _dealt(bins, lengths, world_size)


def _packed(sized: list[tuple[int, int]], world_size: int, max_tokens: int) -> list[MicroBatch]:
    """Fewest equal counts per rank that hold everything, filled evenly (longest first to the emptiest)."""
    per_rank = max(1, math.ceil(sum(length for length, _ in sized) / (world_size * max_tokens)))
    while True:
        rows: list[Row] = [[] for _ in range(per_rank * world_size)]
        heap = [(0, index) for index in range(len(rows))]
        for length, example in sized:
            filled, index = heap[0]
            if filled + length > max_tokens:
                break
            heapq.heapreplace(heap, (filled + length, index))
            rows[index].append(example)
        else:
            return [[row] if row else [] for row in rows]
        per_rank += 1


def _padded(sized: list[tuple[int, int]], world_size: int, max_tokens: int) -> list[MicroBatch]:
    """Neighbours in length share a micro-batch; its rows x its longest row stay within `max_tokens`."""
    groups: list[list[int]] = []
    longest = 0
    for length, example in sized:
        if not groups or (len(groups[-1]) + 1) * longest > max_tokens:
            groups.append([])
            longest = length
        groups[-1].append(example)
    while len(groups) % world_size:  # share the fullest out rather than leave a rank idle
        widest = max(range(len(groups)), key=lambda g: len(groups[g]), default=None)
        if widest is None or len(groups[widest]) < 2:
            groups.append([])
        else:
            half = len(groups[widest]) // 2
            groups.append(groups[widest][half:])
            del groups[widest][half:]
    return [[[example] for example in group] for group in groups] or [[] for _ in range(world_size)]


def _dealt(bins: list[MicroBatch], lengths: np.ndarray, world_size: int) -> Window:
    order = sorted(range(len(bins)), key=lambda b: (-cost(bins[b], lengths), b))
    window: Window = [[] for _ in range(world_size)]
    for index, place in enumerate(order):
        turn, seat = divmod(index, world_size)
        window[seat if turn % 2 == 0 else world_size - 1 - seat].append(bins[place])
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
