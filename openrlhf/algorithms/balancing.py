"""Splitting samples by length: over ranks evenly, over micro-batches within a token budget.

Everything here is plain Python on a list of lengths (or costs) and returns lists of indices into
it; the same input gives the same split on every rank.
"""

import heapq
from bisect import bisect_left, insort
from collections.abc import Sequence


def balanced_partitions(lengths: Sequence[int], num_parts: int) -> list[list[int]]:
    """Split into `num_parts` lists of nearly equal total length; their counts may differ.

    Longest first, each to the part that is shortest so far (LPT: the longest part is at most 4/3 of
    the best possible one). No part is empty unless there are fewer samples than parts.
    """
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    # (total length, count, part) as the digits of one number, which compares in half the time
    base = max(num_parts, len(lengths) + 1)
    heap, unit = list(range(num_parts)), base * base
    for index in _longest_first(lengths):
        shortest = heap[0]
        parts[shortest % base].append(index)
        heapq.heapreplace(heap, shortest + lengths[index] * unit + base)
    for part in parts:
        part.sort()
    return parts


def token_budget_batches(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Split into few batches of at most `max_tokens` each; a longer sample is a batch of its own.

    Longest first, each into the fullest batch with room for it (best fit decreasing: at most 11/9
    of the fewest possible, plus one).
    """
    batches: list[list[int]] = []
    rooms: list[tuple[int, int]] = []  # ascending (tokens still free, batch)
    for index in _longest_first(lengths):
        position = bisect_left(rooms, (lengths[index], -1))
        if position == len(rooms):
            batches.append([index])
            insort(rooms, (max_tokens - lengths[index], len(batches) - 1))
        else:
            room, batch = rooms.pop(position)
            batches[batch].append(index)
            insort(rooms, (room - lengths[index], batch))
    return [sorted(batch) for batch in batches]


def fixed_batches(num_samples: int, batch_size: int) -> list[list[int]]:
    """Return consecutive indices, `batch_size` at a time; the last batch may be smaller."""
    starts = range(0, num_samples, batch_size)
    return [list(range(start, min(start + batch_size, num_samples))) for start in starts]


def _longest_first(lengths: Sequence[int]) -> list[int]:
    return sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)  # equal ones in order
