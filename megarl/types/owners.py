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

Spans = dict[int, list[tuple[int, int]]]
"""For a rank: where each of some sequences begins, and how many tokens it has."""


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

    @property
    def leads(self) -> bool:
        """Tell whether this rank counts for its block, where what all blocks have is added up."""
        return self.block >= 0 and self.blocks[self.block][0] == self.ranks.rank

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
        if not self.leads:
            values.zero_()
        return self.ranks.sum_(values, what)


@dataclass(frozen=True, kw_only=True, eq=False)
class Holders:
    """Knows which ranks give the tokens of responses to a batch, before it is made: the first of each replica.

    Others of a replica may have them, too. But they come from one rank, so that all that train on a response have the
    same bits of it.

    Attributes:
        own: this rank's replica.
        first: the first rank of each replica.
        ranks: exchanges tensors between all ranks.
    """

    own: int
    first: tuple[int, ...]
    ranks: Ranks

    @property
    def gives(self) -> bool:
        """Tell whether this rank gives its replica's tokens."""
        return self.ranks.rank in self.first

    def owners(self, holders: Iterable[int | None]) -> Owners:
        """Say who has the tokens of sequences, by the replica that holds each; None: this rank's."""
        block_of = torch.tensor([self.own if holder is None else holder for holder in holders], dtype=torch.int64)
        return Owners(block_of=block_of, blocks=tuple((rank,) for rank in self.first), ranks=self.ranks)


def starts_of(sequences: Tensor, lengths: Tensor) -> Tensor:
    """Place the first token of each sequence, where some lie one after the other: int64 [N], -1 for the others."""
    counts = lengths[sequences]
    return torch.full_like(lengths, -1).index_copy_(0, sequences, counts.cumsum(0) - counts)


def moved(columns: Mapping[str, Tensor], lengths: Tensor, had: Owners, wanted: Owners) -> dict[str, Tensor]:
    """Send columns of tokens to the ranks that want them; every rank calls it.

    The ranks of a block take turns in sending, and what a rank has already it takes from itself. Columns go one after
    the other, and of each some sequences at a time, so that little is under way at once.

    Args:
        columns: of the tokens that this rank has, sequence after sequence, in ascending order: [T, ...] each; the same
            columns on every rank.
        lengths: int64 [N], tokens of each sequence.

    Returns:
        the columns of the tokens that it wants, in the same order.
    """
    assert bool((had.block_of[wanted.own] >= 0).all()), "no rank has some of the tokens"
    if len(had.blocks) == 1 and len(had.blocks[0]) == had.ranks.size:  # every rank has all
        spans = _spans(wanted.own, starts_of(had.own, lengths), lengths)
        return {name: _cut(column, spans) for name, column in columns.items()}
    sent, got = _sent(had, wanted), _got(had, wanted)
    starts, places = starts_of(had.own, lengths), starts_of(wanted.own, lengths)
    count, of_block = int(lengths[wanted.own].sum()), int(lengths[wanted.block_of >= 0].sum()) // len(wanted.blocks)
    received = {}
    for name, column in columns.items():
        out = received[name] = column.new_empty(count, *column.shape[1:])
        rounds = 1 + of_block * _bytes_of_token(column) // _AT_ONCE  # the same on every rank
        at_once = max(1, -(-len(lengths) // rounds))
        for first in range(0, len(lengths), at_once):
            some = range(first, first + at_once)
            given = {taker: _spans(_among(sequences, some), starts, lengths) for taker, sequences in sent.items()}
            arriving = {giver: _spans(_among(sequences, some), places, lengths) for giver, sequences in got.items()}
            _exchange(column, out, given, arriving, had.ranks)
    return received


_AT_ONCE = 32 * 2**20
"""Bytes of a column that a block gets in one exchange, about."""


def _sent(had: Owners, wanted: Owners) -> dict[int, Tensor]:
    """List the sequences whose tokens this rank gives to each rank, itself included."""
    return {
        taker: had.own[wanted.block_of[had.own] == block]
        for taker, place, block in wanted.members()
        if had.block >= 0 and _giver(taker, place, had, had.block) == had.ranks.rank
    }


def _got(had: Owners, wanted: Owners) -> dict[int, Tensor]:
    """List the sequences whose tokens this rank gets from each rank, itself included."""
    if wanted.block < 0:
        return {}
    rank, had_by = had.ranks.rank, had.block_of[wanted.own]
    place = wanted.blocks[wanted.block].index(rank)
    return {_giver(rank, place, had, block): wanted.own[had_by == block] for block in range(len(had.blocks))}


def _among(sequences: Tensor, some: range) -> Tensor:
    """Keep of ascending sequences those in a range."""
    first, after = torch.searchsorted(sequences, torch.tensor([some.start, some.stop])).tolist()
    return sequences[first:after]


def _spans(sequences: Tensor, starts: Tensor, lengths: Tensor) -> list[tuple[int, int]]:
    """List where each sequence begins, and how many tokens it has."""
    return list(zip(starts[sequences].tolist(), lengths[sequences].tolist(), strict=True))


def _exchange(column: Tensor, out: Tensor, given: Spans, arriving: Spans, ranks: Ranks) -> None:
    """Send tokens of a column to other ranks, and put those that arrive into their places.

    Args:
        given: which tokens each rank gets.
        arriving: where those of each rank belong in `out`.
    """
    parts, sizes = [torch.empty(0, dtype=torch.uint8)] * ranks.size, [0] * ranks.size
    for taker, spans in given.items():
        parts[taker] = _cut(column, spans).flatten().view(torch.uint8)
    for giver, spans in arriving.items():
        sizes[giver] = sum(n for _, n in spans) * _bytes_of_token(column)
    arrived = ranks.exchange(parts, sizes, "tokens of other ranks")
    for giver, spans in arriving.items():
        pieces = arrived[giver].view(column.dtype).view(-1, *column.shape[1:]).split([n for _, n in spans])
        for (at, n), piece in zip(spans, pieces, strict=True):
            out[at : at + n] = piece


def _cut(column: Tensor, spans: list[tuple[int, int]]) -> Tensor:
    """Join parts of a column, each from a place on and so many tokens long."""
    return torch.cat([column[:0], *(column[a : a + n] for a, n in spans)])


def _giver(taker: int, place: int, had: Owners, block: int) -> int:
    """Choose the rank of a block that gives its tokens to the rank at some place of another block."""
    ranks = had.blocks[block]
    return taker if taker in ranks else ranks[place % len(ranks)]


def _bytes_of_token(column: Tensor) -> int:
    return column.element_size() * math.prod(column.shape[1:])
