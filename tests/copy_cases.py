"""Random strided copies between pieces of memory, and what they should give."""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from megarl.reshard.transport.copies import COPY, rectangles

UNWRITTEN = -7


@dataclass(frozen=True, kw_only=True)
class Copies:
    """Copies among memories, made twice: as numbers, and as pairs of views.

    Attributes:
        copies: of dtype COPY, [n].
        memories: sources, then destinations; integers.
        pairs: source and destination view of each strided copy.
    """

    copies: np.ndarray
    memories: list[Tensor]
    pairs: list[tuple[Tensor, Tensor]]

    @property
    def bases(self) -> np.ndarray:
        return np.array([memory.data_ptr() for memory in self.memories], dtype=np.int64)

    def clear(self) -> None:
        for memory in self.memories[1::2]:
            memory.fill_(UNWRITTEN)

    def expected(self) -> list[Tensor]:
        """The destinations after the copies, by torch."""
        self.clear()
        for source, destination in self.pairs:
            destination.copy_(source)
        after = [memory.clone() for memory in self.memories[1::2]]
        self.clear()
        return after

    def check(self, expected: list[Tensor]) -> None:
        for memory, want in zip(self.memories[1::2], expected, strict=True):
            assert torch.equal(memory, want)


def random_copies(seed: int, *, device: str = "cpu", count: int = 5, largest: int = 9) -> Copies:
    """`count` copies of views of up to four axes, no two into the same element, of 1, 2 or 4-byte elements.

    Memory starts anywhere in its allocation, so that words of all sizes occur.
    """
    rng = random.Random(seed)
    dtype = rng.choice([torch.int8, torch.int16, torch.int32])
    memories, pairs, rows = [], [], []
    for i in range(count):
        size = [rng.randint(1, largest) for _ in range(rng.randint(1, 4))]
        if rng.random() < 0.4:  # aligned as in real models
            size[-1] *= 16
        ends = []
        for _ in range(2):
            shape = [n + rng.choice([0, 0, 1, 16]) for n in size]
            lead = rng.choice([0, 16, rng.randint(0, 20)])
            memory = torch.randint(-100, 100, (lead + int(np.prod(shape)),), device=device).to(dtype)[lead:]
            low = [rng.choice([0, whole - part]) for whole, part in zip(shape, size, strict=True)]
            view = memory.view(shape)[tuple(slice(a, a + n) for a, n in zip(low, size, strict=True))]
            memories.append(memory)
            ends.append((view, view.storage_offset() - memory.storage_offset()))
        (source, source_at), (destination, destination_at) = ends
        pairs.append((source, destination))
        item = dtype.itemsize
        for a, b, n, columns, stride_a, stride_b in rectangles(tuple(size), source.stride(), destination.stride()):
            at = item * (source_at + a), item * (destination_at + b)
            rows.append((i % 3, 2 * i, 2 * i + 1, *at, n, item * columns, item * stride_a, item * stride_b))
    return Copies(copies=np.array(rows, dtype=COPY), memories=memories, pairs=pairs)
