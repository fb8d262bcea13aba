"""Says which ranks have a batch's tokens, and sends tokens from those that have them to those that want them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
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


@dataclass(frozen=True, kw_only=True, eq=False)
class Holders:
    """Knows the ranks that may have tokens, block by block, before a batch is made of them.

    Attributes:
        blocks, ranks: see `Owners`.
    """

    blocks: Blocks
    ranks: Ranks

    def owners(self, holders: Iterable[int | None]) -> Owners:
        """Say who has the tokens of sequences, by the block that holds each; None: this rank's."""
        own = next(i for i, block in enumerate(self.blocks) if self.ranks.rank in block)
        block_of = torch.tensor([own if holder is None else holder for holder in holders], dtype=torch.int64)
        return Owners(block_of=block_of, blocks=self.blocks, ranks=self.ranks)


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
    rank, starts = had.ranks.rank, starts_of(had.own, lengths)
    given = [torch.empty(0).long()] * had.ranks.size  # the tokens that each rank gets of this one
    if had.block >= 0:
        for taker, place, block in wanted.members():
            if _giver(taker, place, had, had.block) == rank:
                sequences = had.own[wanted.block_of[had.own] == block]
                given[taker] = tokens_of(sequences, starts, lengths)
    counts, arriving = [0] * had.ranks.size, [torch.empty(0).long()]
    if wanted.block >= 0:
        place, had_by = wanted.blocks[wanted.block].index(rank), had.block_of[wanted.own]
        givers = {_giver(rank, place, had, block): block for block in had_by.unique().tolist() if block >= 0}
        for giver, block in sorted(givers.items()):
            arriving.append(wanted.own[had_by == block])
            counts[giver] = int(lengths[arriving[-1]].sum())
    sequences = torch.cat(arriving)
    assert len(sequences) == len(wanted.own), "no rank has some of the tokens"
    order = tokens_of(wanted.own, starts_of(sequences, lengths), lengths)
    received = {}
    for name, column in columns.items():  # one after the other: a column is large
        each = column.element_size() * math.prod(column.shape[1:])
        parts = [column[tokens].flatten().view(torch.uint8) for tokens in given]
        whole = torch.cat(had.ranks.exchange(parts, [n * each for n in counts], "tokens of other ranks"))
        received[name] = whole.view(column.dtype).view(-1, *column.shape[1:])[order]
    return received


def _giver(taker: int, place: int, had: Owners, block: int) -> int:
    """Choose the rank of a block that gives its tokens to the rank at some place of another block."""
    ranks = had.blocks[block]
    return taker if taker in ranks else ranks[place % len(ranks)]
