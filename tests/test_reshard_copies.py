"""Strided copies as tables of tiles, carried out by numpy, against views that torch copies."""

from __future__ import annotations

import ctypes
from math import prod

import numpy as np
import pytest
import torch
from copy_cases import random_copies
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.reshard.transport import copies
from megarl.reshard.transport.copies import COPY, Cut, cut, rectangles


def execute(cuts: list[Cut], bases: np.ndarray) -> None:
    """What the kernel does, in numpy: every word of every tile, from address to address."""
    for part in cuts:
        table = part.table(bases)
        for entry, number in part.tiles:
            source, destination, row_words, words, source_stride, destination_stride = table[entry]
            word = np.arange(number * copies.TILE_WORDS, min((number + 1) * copies.TILE_WORDS, words))
            row, column = word // row_words, word % row_words
            for read, write in zip(row * source_stride + column, row * destination_stride + column, strict=True):
                at = int(source + read * part.word), int(destination + write * part.word)
                assert at[0] % part.word == at[1] % part.word == 0
                ctypes.memmove(at[1], at[0], part.word)


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies, "TILE_WORDS", 32)


@settings(max_examples=80, deadline=None)
@given(st.integers(0, 10**6))
def test_tiles_copy_what_the_views_hold(seed: int) -> None:
    case = random_copies(seed)
    expected = case.expected()
    execute(cut(case.copies, case.bases), case.bases)
    case.check(expected)


def test_all_word_sizes_occur_in_these_copies() -> None:
    seen = {part.word for seed in range(60) for case in [random_copies(seed)] for part in cut(case.copies, case.bases)}
    assert seen == {1, 2, 4, 8, 16}


def test_a_cut_outlives_memory_that_moves() -> None:
    case = random_copies(3)
    expected = case.expected()
    cuts = cut(case.copies, case.bases)
    for i, memory in enumerate(case.memories):
        room = torch.empty(memory.nbytes + 64, dtype=torch.int8)
        start = (memory.data_ptr() - room.data_ptr()) % copies.WIDEST
        case.memories[i] = room[start : start + memory.nbytes].view(memory.dtype).copy_(memory)
    execute(cuts, case.bases)
    case.check(expected)


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 10**6))
def test_words_are_as_wide_as_the_addresses_allow(seed: int) -> None:
    case = random_copies(seed)
    for part in cut(case.copies, case.bases):
        for c in part.copies:
            numbers = [
                int(case.bases[c["source"]] + c["source_offset"]),
                int(case.bases[c["destination"]] + c["destination_offset"]),
                int(c["row_bytes"]),
                *([int(c["source_stride"]), int(c["destination_stride"])] if c["rows"] > 1 else []),
            ]
            assert all(n % part.word == 0 for n in numbers)
            assert part.word == 16 or any(n % (2 * part.word) for n in numbers)


@pytest.mark.parametrize(
    ("size", "source", "destination", "expected"),
    [
        ((4, 3, 5), (15, 5, 1), (15, 5, 1), [(0, 0, 1, 60, 0, 0)]),  # dense in both
        ((4, 3, 5), (40, 5, 1), (15, 5, 1), [(0, 0, 4, 15, 40, 15)]),  # q of a fused qkv
        ((1, 3, 1, 5), (99, 7, 7, 1), (88, 5, 5, 1), [(0, 0, 3, 5, 7, 5)]),  # axes of one element count for nothing
        ((6, 1), (4, 1), (9, 1), [(0, 0, 6, 1, 4, 9)]),  # a column
        ((1, 1), (4, 1), (9, 1), [(0, 0, 1, 1, 0, 0)]),
        ((2, 6, 5), (100, 7, 1), (50, 6, 1), [(0, 0, 6, 5, 7, 6), (100, 50, 6, 5, 7, 6)]),  # three axes that stay
        ((6, 2, 5), (100, 7, 1), (50, 6, 1), [(0, 0, 6, 5, 100, 50), (7, 6, 6, 5, 100, 50)]),  # as few as can be
    ],
)
def test_rectangles(
    size: tuple[int, ...], source: tuple[int, ...], destination: tuple[int, ...], expected: list[tuple[int, ...]]
) -> None:
    assert list(rectangles(size, source, destination)) == expected
    assert sum(rows * columns for _, _, rows, columns, _, _ in expected) == prod(size)


def test_links_take_turns_in_proportion() -> None:
    """What has come through each link after any number of tiles is what its part of all tiles would be, within one."""
    sizes = {0: 90, 1: 300, 2: 300, 5: 30}  # tiles
    rows = [(link, 0, 1, 0, 0, 1, 16 * copies.TILE_WORDS * tiles, 0, 0) for link, tiles in sizes.items()]
    (part,) = cut(np.array(rows, dtype=COPY), np.zeros(2, dtype=np.int64))
    links = part.copies["link"][part.tiles[:, 0]]
    whole = sum(sizes.values())
    for link, tiles in sizes.items():
        come = np.cumsum(links == link)
        assert come[-1] == tiles
        assert np.abs(come - tiles * np.arange(1, whole + 1) / whole).max() <= 1
        assert (part.tiles[links == link, 1] == np.arange(tiles)).all()
