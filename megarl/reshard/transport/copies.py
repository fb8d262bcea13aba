"""Writes strided copies as rows of numbers, and cuts them into tiles. Arithmetic on numpy arrays, torch-free.

A copy is `rows` rows of `row_bytes` bytes, at an offset in one piece of memory, to an offset in another. Pieces of
memory have numbers here; their addresses are given when the bytes move, so that a table outlives memory that moves.

A kernel's program copies one tile: `TILE_WORDS` words of a copy, counted row by row. A word is the widest unit, up to
16 bytes, that a copy's addresses, strides and rows are multiples of. Tiles of all links alternate in proportion to
what comes through each: then every link is busy from the first to the last, and so is every sender, since all ranks
take from all their senders at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import product

import numpy as np

COPY = np.dtype(
    [
        (name, np.int64)
        for name in (
            "link",  # where the source's bytes come from: copies of one link share its bandwidth
            "source",  # number of the memory
            "destination",
            "source_offset",  # bytes, as all below
            "destination_offset",
            "rows",
            "row_bytes",
            "source_stride",
            "destination_stride",
        )
    ]
)
"""A copy."""

WIDEST = 16
"""Bytes of the widest word: what a GPU's thread loads at once."""

TILE_WORDS = 1024
"""Words that one program copies: 16 KiB, of which a warp has eight loads under way for each lane."""

Strides = tuple[int, ...]


@cache
def rectangles(size: Strides, source: Strides, destination: Strides) -> tuple[tuple[int, int, int, int, int, int], ...]:
    """Turn a strided copy into copies of rows.

    Args:
        size: of both views, per axis.
        source, destination: their strides, elements. The last axis of more than one element is dense in both.

    Returns:
        of each: offsets of source and destination, rows, elements in a row, strides of source and destination.
    """
    axes: list[tuple[int, int, int]] = [(1, 1, 1)]  # from the last to the first: size and both strides
    for n, a, b in zip(reversed(size), reversed(source), reversed(destination), strict=True):
        inner, inner_a, inner_b = axes[-1]
        if n == 1:
            continue
        if a == inner * inner_a and b == inner * inner_b:
            axes[-1] = (n * inner, inner_a, inner_b)
        else:
            axes.append((n, a, b))
    (columns, *_), *outer = axes
    *others, (rows, a, b) = sorted(outer) or [(1, 0, 0)]
    return tuple(
        (
            sum(i * a for i, (_, a, _) in zip(at, others, strict=True)),
            sum(i * b for i, (_, _, b) in zip(at, others, strict=True)),
            rows,
            columns,
            a,
            b,
        )
        for at in product(*(range(n) for n, _, _ in others))
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class Cut:
    """Holds copies with the same word, in tiles.

    Attributes:
        word: bytes.
        copies: of dtype COPY, [n].
        tiles: int32 [t, 2], in the order in which they should start: number of the copy, and of the tile within it.
    """

    word: int
    copies: np.ndarray
    tiles: np.ndarray

    def table(self, bases: np.ndarray) -> np.ndarray:
        """Tabulate each copy for a kernel.

        Args:
            bases: int64 [memories], addresses.

        Returns:
            int64 [n, 6]: addresses of source and destination; words in a row, and in all rows; strides in words.
        """
        c = self.copies
        columns = (
            bases[c["source"]] + c["source_offset"],
            bases[c["destination"]] + c["destination_offset"],
            c["row_bytes"] // self.word,
            _words(c, self.word),
            c["source_stride"] // self.word,
            c["destination_stride"] // self.word,
        )
        return np.stack(columns, axis=1)


def cut(copies: np.ndarray, bases: np.ndarray) -> list[Cut]:
    """Cut all copies, the widest words first. The result depends on the addresses only modulo `WIDEST`.

    Args:
        copies: of dtype COPY, [n].
        bases: int64 [memories], addresses.
    """
    words = _word_sizes(copies, bases)
    return [
        Cut(word=int(word), copies=same, tiles=_tiles(same, int(word)))
        for word in np.unique(words)[::-1]
        for same in (copies[words == word],)
    ]


def _word_sizes(copies: np.ndarray, bases: np.ndarray) -> np.ndarray:
    several = copies["rows"] > 1
    bits = (
        (bases[copies["source"]] + copies["source_offset"])
        | (bases[copies["destination"]] + copies["destination_offset"])
        | copies["row_bytes"]
        | np.where(several, copies["source_stride"] | copies["destination_stride"], 0)
        | WIDEST
    )
    return bits & -bits


def _words(copies: np.ndarray, word: int) -> np.ndarray:
    words: np.ndarray = copies["rows"] * (copies["row_bytes"] // word)
    assert words.max(initial=0) < 2**31 - TILE_WORDS, "the kernel counts the words of a copy in 32 bits"
    return words


def _tiles(copies: np.ndarray, word: int) -> np.ndarray:
    per_copy = -(-_words(copies, word) // TILE_WORDS)
    copy = np.repeat(np.arange(len(copies)), per_copy)
    number = np.arange(len(copy)) - np.repeat(np.cumsum(per_copy) - per_copy, per_copy)
    order = np.argsort(_progress(copies["link"][copy]), kind="stable")
    return np.stack((copy, number), axis=1).astype(np.int32)[order]


def _progress(links: np.ndarray) -> np.ndarray:
    """Compute for each element the part of its link's elements up to the middle of this one."""
    _, link, count = np.unique(links, return_inverse=True, return_counts=True)
    order = np.argsort(link, kind="stable")
    place = np.empty(len(link))
    place[order] = np.arange(len(link)) - np.repeat(np.cumsum(count) - count, count)
    progress: np.ndarray = (place + 0.5) / count[link]
    return progress
