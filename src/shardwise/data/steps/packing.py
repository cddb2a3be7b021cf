"""Which examples of a step run together: in one row (packed), or in rows of their own side by side (padded).

Examples come as (tokens, id), longest first, none longer than `max_tokens`; the answer is a list of groups of ids,
as many for every rank, of which some may be empty.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, insort

Row = list[int]
EVEN_PLACEMENTS = 20_000
"""Work spent on filling fewer rows evenly than best fit needs; up to 141 examples that is every count."""


def packed(sized: list[tuple[int, int]], world_size: int, max_tokens: int) -> list[Row]:
    """As few as best fit needs (rounded up to equal counts per rank), filled evenly where that fits so few.

    Even ones are cheaper, since ranks wait less and attention grows with the square of a row; fewer are cheaper
    still. Filling evenly at times takes fewer than best fit, which is tried within EVEN_PLACEMENTS.
    """
    best = _best_fit(sized, max_tokens)
    count = world_size * max(1, math.ceil(len(best) / world_size))
    fewest = world_size * max(1, math.ceil(sum(length for length, _ in sized) / (world_size * max_tokens)))
    tries = EVEN_PLACEMENTS // max(1, len(sized))
    for fewer in range(max(fewest, count - tries * world_size), count + 1, world_size):
        even = _evenly(sized, fewer, max_tokens)
        if even is not None:
            return even
    return _shared_out(best, world_size)


def _best_fit(sized: list[tuple[int, int]], max_tokens: int) -> list[Row]:
    """Longest first into the fullest row that still has room."""
    rows: list[Row] = []
    base = len(sized)
    room: list[int] = []  # tokens left x base + number of the row, sorted
    for length, example in sized:
        at = bisect_left(room, length * base)
        if at == len(room):
            left, index = max_tokens, len(rows)
            rows.append([])
        else:
            left, index = divmod(room.pop(at), base)
        rows[index].append(example)
        if left > length:
            insort(room, (left - length) * base + index)
    return rows


def _evenly(sized: list[tuple[int, int]], count: int, max_tokens: int) -> list[Row] | None:
    """Longest first into the emptiest of `count` rows; None when one does not fit."""
    rows: list[Row] = [[] for _ in range(count)]
    heap = list(range(count))  # tokens so far x count + number of the row
    for length, example in sized:
        filled, index = divmod(heap[0], count)
        if filled + length > max_tokens:
            return None
        heapq.heapreplace(heap, heap[0] + length * count)
        rows[index].append(example)
    return rows


def padded(sized: list[tuple[int, int]], world_size: int, max_tokens: int) -> list[Row]:
    """Neighbours in length share a micro-batch; its rows x its longest row stay within `max_tokens`."""
    groups: list[list[int]] = []
    longest = 0
    for length, example in sized:
        if not groups or (len(groups[-1]) + 1) * longest > max_tokens:
            groups.append([])
            longest = length
        groups[-1].append(example)
    return _shared_out(groups, world_size)


def _shared_out(groups: list[list[int]], world_size: int) -> list[list[int]]:
    """As many for every rank: the fullest are halved rather than a rank left idle."""
    heap = [(-len(group), index) for index, group in enumerate(groups)]
    heapq.heapify(heap)
    while len(groups) % world_size or not groups:
        size, widest = heap[0] if heap else (0, 0)
        half = -size // 2
        groups.append(groups[widest][half:] if half else [])
        if half:
            del groups[widest][half:]
            heapq.heapreplace(heap, (-half, widest))
            heapq.heappush(heap, (-len(groups[-1]), len(groups) - 1))
    return groups
