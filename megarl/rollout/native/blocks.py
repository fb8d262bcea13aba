"""Lists the free blocks of the KV cache, and counts the sequences that hold each of the others. Pure Python.

Paging the cache is PagedAttention's idea (arXiv 2309.06180): a sequence takes memory as it grows, and sequences with
the same beginning hold the same blocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

SCRATCH_BLOCK = 0
"""A block of no sequence: rows that only fill up a batch write here."""


class BlockPool:
    """Gives blocks out, lowest first, so that all ranks of a replica use the same blocks.

    Args:
        blocks: their number, the scratch block included.
    """

    def __init__(self, blocks: int) -> None:
        self._free = list(range(blocks - 1, SCRATCH_BLOCK, -1))
        self._holders = [0] * blocks

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int]:
        blocks = [self._free.pop() for _ in range(count)]
        for block in blocks:
            self._holders[block] = 1
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """Count another sequence that holds these blocks."""
        for block in blocks:
            self._holders[block] += 1

    def give_back(self, blocks: Sequence[int]) -> None:
        """Take blocks back from a sequence; those that no other sequence holds are free."""
        for block in reversed(blocks):
            self._holders[block] -= 1
            if not self._holders[block]:
                self._free.append(block)
