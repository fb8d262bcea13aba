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
        return self.first[self.own] == self.ranks.rank

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
        spans = list(zip(starts_of(had.own, lengths)[wanted.own].tolist(), lengths[wanted.own].tolist(), strict=True))
        return {name: _cut(column, spans) for name, column in columns.items()}
    count, of_block = int(lengths[wanted.own].sum()), int(lengths[wanted.block_of >= 0].sum()) // len(wanted.blocks)
    received = {}
    for name, column in columns.items():
        received[name] = column.new_empty(count, *column.shape[1:])
        rounds = 1 + of_block * _bytes_of_token(column) // _AT_ONCE  # the same on every rank
        for some in torch.arange(len(lengths)).chunk(rounds):
            _move(column, received[name], lengths, had, wanted, some)
    return received


_AT_ONCE = 32 * 2**20
"""Bytes of a column that a block gets in one exchange, about."""


def _move(column: Tensor, received: Tensor, lengths: Tensor, had: Owners, wanted: Owners, some: Tensor) -> None:
    """Send the tokens of some neighbouring sequences into their places among those that are `received`."""
    rank, each = had.ranks.rank, _bytes_of_token(column)
    parts, sizes = [torch.empty(0, dtype=torch.uint8)] * had.ranks.size, [0] * had.ranks.size
    if had.block >= 0:
        own, starts = some[had.block_of[some] == had.block], starts_of(had.own, lengths)
        for taker, place, block in wanted.members():
            if _giver(taker, place, had, had.block) == rank:
                sent = own[wanted.block_of[own] == block]
                spans = list(zip(starts[sent].tolist(), lengths[sent].tolist(), strict=True))
                parts[taker] = _cut(column, spans).flatten().view(torch.uint8)
    given: dict[int, Tensor] = {}
    if wanted.block >= 0:
        own, place = some[wanted.block_of[some] == wanted.block], wanted.blocks[wanted.block].index(rank)
        given = {_giver(rank, place, had, block): own[had.block_of[own] == block] for block in range(len(had.blocks))}
    for giver, sequences in given.items():
        sizes[giver] = int(lengths[sequences].sum()) * each
    arrived = had.ranks.exchange(parts, sizes, "tokens of other ranks")
    places = starts_of(wanted.own, lengths)
    for giver, sequences in given.items():
        pieces = arrived[giver].view(column.dtype).view(-1, *column.shape[1:]).split(lengths[sequences].tolist())
        for at, piece in zip(places[sequences].tolist(), pieces, strict=True):
            received[at : at + len(piece)] = piece


def _cut(column: Tensor, spans: list[tuple[int, int]]) -> Tensor:
    """Join parts of a column, each from a place on and so many tokens long."""
    return torch.cat([column[:0], *(column[a : a + n] for a, n in spans)])


def _giver(taker: int, place: int, had: Owners, block: int) -> int:
    """Choose the rank of a block that gives its tokens to the rank at some place of another block."""
    ranks = had.blocks[block]
    return taker if taker in ranks else ranks[place % len(ranks)]


def _bytes_of_token(column: Tensor) -> int:
    return column.element_size() * math.prod(column.shape[1:])
