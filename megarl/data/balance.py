"""Splits numbers into parts of nearly equal sum."""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def karmarkar_karp(lengths: Sequence[int], indices: Sequence[int], parts: int) -> list[list[int]]:
    """Split `indices` into `parts` lists whose sums of `lengths` are nearly equal; equal counts are not sought.

    Largest differencing method for any number of parts (Karmarkar and Karp, "The Differencing Method of Set
    Partitioning", UCB/CSD 82/113, 1982): every item starts as a partition of its own, the other parts empty; then the
    two partitions with the widest spread are merged, the heaviest part of one with the lightest of the other, until
    one is left. No part is empty if there are as many (positive) items as parts.

    Returns:
        Parts by falling sum, each in rising order. The same input gives the same parts, everywhere.
    """
    if not indices:
        return [[] for _ in range(parts)]
    heap: list[tuple[int, int, list[tuple[int, list[int]]]]] = []  # (-spread, tie-break, parts by falling sum)
    for i in indices:
        partition = [(lengths[i], [i])] + [(0, [])] * (parts - 1)
        heap.append((partition[-1][0] - partition[0][0], i, partition))
    heapq.heapify(heap)
    while len(heap) > 1:
        _, tie, first = heapq.heappop(heap)
        _, _, second = heapq.heappop(heap)
        merged = [(a + b, x + y) for (a, x), (b, y) in zip(first, reversed(second), strict=True)]
        merged.sort(key=lambda part: (-part[0], part[1]))
        heapq.heappush(heap, (merged[-1][0] - merged[0][0], tie, merged))
    return [sorted(part) for _, part in heap[0][2]]


def first_fit_decreasing(lengths: Sequence[int], indices: Sequence[int], limit: int) -> list[list[int]]:
    """Fill few lists whose sums of `lengths` stay within `limit`: the longest first, each into the first with room."""
    bins: list[list[int]] = []
    room: list[int] = []
    for i in sorted(indices, key=lambda i: (-lengths[i], i)):
        at = next((b for b, left in enumerate(room) if left >= lengths[i]), None)
        if at is None:
            bins.append([])
            room.append(limit)
            at = len(bins) - 1
        bins[at].append(i)
        room[at] -= lengths[i]
    return [sorted(part) for part in bins]
