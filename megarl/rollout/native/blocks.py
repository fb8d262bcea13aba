"""Counts which blocks of the KV cache are free, and how many sequences hold each of the others. Pure Python.

Paging the cache is PagedAttention's idea (arXiv 2309.06180): a sequence takes memory as it grows, and sequences with
the same beginning hold the same blocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

SCRATCH_BLOCK = 0
"""Belongs to no sequence: rows that only fill up a batch write here."""


class BlockPool:
    """Blocks are given out lowest first, so that all ranks of a replica use the same ones.

    Args:
        blocks: how many there are, the scratch block included.
    """

    def __init__(self, blocks: int) -> None:
        self._free = list(range(blocks - 1, SCRATCH_BLOCK, -1))
        self._holders = [0] * blocks

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int]:
        taken = [self._free.pop() for _ in range(count)]
        for block in taken:
            self._holders[block] = 1
        return taken

    def share(self, blocks: Iterable[int]) -> None:
        """Count one more sequence that holds these blocks."""
        for block in blocks:
            self._holders[block] += 1

    def give_back(self, blocks: Sequence[int]) -> None:
        """A sequence lets go of these; those that nobody else holds are free."""
        for block in reversed(blocks):
            self._holders[block] -= 1
            if not self._holders[block]:
                self._free.append(block)
