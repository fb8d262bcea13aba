"""Says which ranks have a batch's tokens, and sends tokens from those that have them to those that want them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

Blocks = tuple[tuple[int, ...], ...]


class Ranks(Protocol):
    """Exchanges tensors on the host between a job's ranks (`megarl.parallel.world.World`)."""

    rank: int
    size: int

    def sum_(self, values: Tensor, what: str) -> Tensor: ...
    def exchange(self, parts: list[Tensor], sizes: list[int], what: str) -> list[Tensor]: ...


@dataclass(frozen=True, kw_only=True, eq=False)
class Owners:
    """Says which ranks have the tokens of which of a batch's N sequences.

    The ranks of a block have the same tokens: those of a data-parallel share, say, which hold its model together. A
    rank is in one block at most.

    Attributes:
        block_of: int64 [N], the block that has a sequence's tokens, by its place in `blocks`; -1: none has.
        blocks: the ranks of each block.
        ranks: exchanges tensors between them.
    """

    block_of: Tensor
    blocks: Blocks
    ranks: Ranks

    @staticmethod
    def everywhere(sequences: int, ranks: Ranks) -> Owners:
        """Give all tokens to every rank."""
        return Owners(block_of=torch.zeros(sequences).long(), blocks=(tuple(range(ranks.size)),), ranks=ranks)

    @cached_property
    def block(self) -> int:
        """Find this rank's block; -1: it is in none."""
        return next((i for i, block in enumerate(self.blocks) if self.ranks.rank in block), -1)

    @cached_property
    def own(self) -> Tensor:
        """List the sequences whose tokens this rank has: int64 [M], ascending."""
        return (self.block_of == self.block).nonzero().flatten() if self.block >= 0 else torch.empty(0).long()

    def members(self) -> Iterator[tuple[int, int, int]]:
        """Name the ranks that have tokens, each with its place in its block and the block."""
        return ((rank, place, i) for i, block in enumerate(self.blocks) for place, rank in enumerate(block))

    def matches(self, other: Owners) -> bool:
        """Tell whether every rank has the same tokens."""
        return self is other or (self.blocks == other.blocks and torch.equal(self.block_of, other.block_of))

    def sum_(self, values: Tensor, what: str = "sums over the tokens of all ranks") -> Tensor:
        """Add up what each block has computed of its tokens, in place; every rank calls it."""
        if self.block < 0 or self.blocks[self.block][0] != self.ranks.rank:
            values.zero_()
        return self.ranks.sum_(values, what)


def tokens_of(sequences: Tensor, starts: Tensor, lengths: Tensor) -> Tensor:
    """Place the tokens of some sequences, one after the other: int64.

    Args:
        starts, lengths: int64 [N], of all sequences.
    """
    counts = lengths[sequences]
    ends = counts.cumsum(0)
    return torch.repeat_interleave(starts[sequences] - (ends - counts), counts) + torch.arange(int(counts.sum()))


def starts_of(sequences: Tensor, lengths: Tensor) -> Tensor:
    """Place the first token of each sequence, where some lie one after the other: int64 [N], -1 for the others."""
    counts = lengths[sequences]
    return torch.full_like(lengths, -1).index_copy_(0, sequences, counts.cumsum(0) - counts)


def moved(columns: Mapping[str, Tensor], lengths: Tensor, had: Owners, wanted: Owners) -> dict[str, Tensor]:
    """Send columns of tokens to the ranks that want them; every rank calls it.

    The ranks of a block take turns in sending, and what a rank has already it takes from itself.

    Args:
        columns: of the tokens that this rank has, sequence after sequence, in ascending order: [T, ...] each; the same
            columns on every rank.
        lengths: int64 [N], tokens of each sequence.

    Returns:
        the columns of the tokens that it wants, in the same order.
    """
    rank, size = had.ranks.rank, had.ranks.size
    starts, empty = starts_of(had.own, lengths), torch.empty(0, dtype=torch.uint8)
    parts, sizes, received = [empty] * size, [0] * size, list[Tensor]()
    bytes_of_token = sum(_bytes_of_token(column) for column in columns.values())
    if had.block >= 0:
        for taker, place, block in wanted.members():
            if _giver(taker, place, had, had.block) == rank:
                sequences = had.own[wanted.block_of[had.own] == block]
                parts[taker] = _packed(columns, tokens_of(sequences, starts, lengths))
    order = list[Tensor]()
    if wanted.block >= 0:
        place, had_by = wanted.blocks[wanted.block].index(rank), had.block_of[wanted.own]
        givers = {_giver(rank, place, had, block): block for block in had_by.unique().tolist() if block >= 0}
        for giver, block in sorted(givers.items()):
            order.append(wanted.own[had_by == block])
            sizes[giver] = int(lengths[order[-1]].sum()) * bytes_of_token
    received = [part for part in had.ranks.exchange(parts, sizes, "tokens of other ranks") if len(part)]
    sequences = torch.cat([*order, torch.empty(0).long()])
    assert len(sequences) == len(wanted.own), "no rank has some of the tokens"
    tokens = tokens_of(wanted.own, starts_of(sequences, lengths), lengths)
    return _unpacked(columns, received, bytes_of_token, tokens)


def _giver(taker: int, place: int, had: Owners, block: int) -> int:
    """Choose the rank of a block that gives its tokens to the rank at some place of another block."""
    ranks = had.blocks[block]
    return taker if taker in ranks else ranks[place % len(ranks)]


def _bytes_of_token(column: Tensor) -> int:
    return column.element_size() * math.prod(column.shape[1:])


def _packed(columns: Mapping[str, Tensor], tokens: Tensor) -> Tensor:
    """Join the bytes of some tokens, column after column: uint8."""
    return torch.cat([column[tokens].view(torch.uint8).flatten() for column in columns.values()])


def _unpacked(
    columns: Mapping[str, Tensor], parts: Sequence[Tensor], bytes_of_token: int, order: Tensor
) -> dict[str, Tensor]:
    """Take columns apart that `_packed` has joined, and put their tokens in order."""
    counts, at, unpacked = [len(part) // bytes_of_token for part in parts], [0] * len(parts), dict[str, Tensor]()
    for name, column in columns.items():
        width = _bytes_of_token(column)
        pieces = [part[a : a + n * width] for part, a, n in zip(parts, at, counts, strict=True)]
        joined = torch.cat([*pieces, torch.empty(0, dtype=torch.uint8)]).view(column.dtype)
        unpacked[name] = joined.view(-1, *column.shape[1:])[order]
        at = [a + n * width for a, n in zip(at, counts, strict=True)]
    return unpacked
