"""Makes all copies of a rank in one launch per word size: a Triton kernel that reads from wherever a pointer leads.

One program per tile: the hardware starts them in order, the next as soon as one is done, so that tiles from this GPU's
own memory, which take a tenth of the time, fill in between those that come through a link.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from megarl.parallel.upload import upload
from megarl.reshard.transport import copies as tiling
from megarl.reshard.transport.copies import WIDEST, Cut, cut

NUM_WARPS = 4
"""Of a program."""

_ELEMENTS = {16: (tl.int64, 2), 8: (tl.int64, 1), 4: (tl.int32, 1), 2: (tl.int16, 1), 1: (tl.int8, 1)}
"""Type and number of the elements of a word, by its bytes."""


@dataclass(frozen=True, kw_only=True, eq=False)
class _Launch:
    """Holds the cut of one word size, and its tiles and table on the device."""

    cut: Cut
    tiles: Tensor
    table: Tensor


class FusedCopy:
    """Makes the same copies again and again, of memory that may move.

    Attributes:
        copies: of dtype `copies.COPY`, [n].
        bases: int64 [memories], addresses of the numbered memories, as last given to `place`.
    """

    def __init__(self, copies: np.ndarray, device: torch.device) -> None:
        self.copies, self._device = copies, device
        self.bases = np.zeros(0, dtype=np.int64)
        self._launches: list[_Launch] = []

    @property
    def nbytes(self) -> int:
        """Count the bytes of the tables on the device."""
        return sum(launch.tiles.nbytes + launch.table.nbytes for launch in self._launches)

    def place(self, bases: np.ndarray) -> None:
        """Note where the memory is now."""
        if np.array_equal(bases, self.bases):
            return
        if not np.array_equal(bases % WIDEST, self.bases % WIDEST):
            cuts = [(part, self._upload(part.tiles)) for part in cut(self.copies, bases)]
        else:
            cuts = [(launch.cut, launch.tiles) for launch in self._launches]
        self._launches = [_Launch(cut=part, tiles=tiles, table=self._upload(part.table(bases))) for part, tiles in cuts]
        self.bases = bases

    def run(self, share: int = 0, shares: int = 1) -> None:
        """Start an even share of the copies, number `share` of `shares`, on the current stream."""
        for launch in self._launches:
            tiles = len(launch.tiles)
            first, stop = tiles * share // shares, tiles * (share + 1) // shares
            if first < stop:
                kind, elements = _ELEMENTS[launch.cut.word]
                _copy[(stop - first,)](
                    launch.table,
                    launch.tiles,
                    first,
                    WORD=launch.cut.word,
                    TYPE=kind,
                    ELEMENTS=elements,
                    WORDS=tiling.TILE_WORDS,
                    num_warps=NUM_WARPS,
                )

    def _upload(self, array: np.ndarray) -> Tensor:
        return upload(torch.from_numpy(array), self._device)


@triton.jit(do_not_specialize=["first"])
def _copy(
    table,
    tiles,
    first,
    WORD: tl.constexpr,
    TYPE: tl.constexpr,
    ELEMENTS: tl.constexpr,
    WORDS: tl.constexpr,
):
    tile = tiles + 2 * (first + tl.program_id(0))
    entry = table + 6 * tl.load(tile).to(tl.int64)
    # without this a word of 16 bytes would be moved in two halves
    source = tl.multiple_of(tl.load(entry).to(tl.pointer_type(TYPE)), WORD)
    destination = tl.multiple_of(tl.load(entry + 1).to(tl.pointer_type(TYPE)), WORD)
    row_words, words = tl.load(entry + 2).to(tl.int32), tl.load(entry + 3).to(tl.int32)
    source_stride, destination_stride = tl.load(entry + 4), tl.load(entry + 5)

    word = tl.load(tile + 1) * WORDS + tl.arange(0, WORDS)
    row = word // row_words
    column = word - row * row_words
    read = (row * source_stride + column) * ELEMENTS
    write = (row * destination_stride + column) * ELEMENTS
    element = tl.arange(0, ELEMENTS)[None, :]
    inside = (word < words)[:, None]
    x = tl.load(source + (read[:, None] + element), mask=inside)
    tl.store(destination + (write[:, None] + element), x, mask=inside)
