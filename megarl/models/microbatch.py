"""Collates sequences of a batch into the tensors of one forward pass, packed or padded.

With context parallelism the ranks that share sequences lay out the same rows, and each keeps some neighbouring columns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.models.attention import PackedSequences, packed_sequences, queries_of_a_rank, queries_with_keys
from megarl.parallel.context import ALL_TO_ALL, ContextKind
from megarl.parallel.train_groups import TrainGroups
from megarl.parallel.upload import upload
from megarl.types import Batch


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """Holds one forward pass over S sequences with R trained tokens; L tokens in B rows (B = 1 when packed).

    With context parallelism this rank has L of the row's columns, the states before R of its trained tokens and the
    last tokens of S of its sequences; all of the micro-batch's are in `columns`, `sequence_columns` and `trained`.

    Attributes:
        tokens: int64 [B, L].
        position_ids: int64 [B, L].
        packed: where the sequences lie in the row, or None when each has a row of its own.
        predictors: int64 [R], positions in the flattened [L * B] hidden states that predict the trained tokens.
        labels: int64 [R], those tokens.
        index: int64 [R], their places in this rank's `Batch.tokens`; on the host.
        cells: int64 [L * B], the places in this rank's `Batch.tokens` of the flattened positions, -1 at padding; on the
            host.
        last: int64 [S], positions in the flattened hidden states of each sequence's last token.
        sequences: int64 [S], their places in the batch; on the host.
        trained: int64, trained tokens of each sequence of the micro-batch.
        columns: float32 each, values of the batch at the micro-batch's trained tokens.
        sequence_columns: float32 each, values of the batch for the micro-batch's sequences.
        temperature: `Batch.temperature`.
        part: where this rank's tokens and sequences are among the micro-batch's; None: it has all.
        repeated: those of `predictors` that are there several times; None: none is.
    """

    tokens: Tensor
    position_ids: Tensor
    packed: PackedSequences | None
    predictors: Tensor
    labels: Tensor
    index: Tensor
    cells: Tensor
    last: Tensor
    sequences: Tensor
    trained: Tensor
    columns: Mapping[str, Tensor]
    sequence_columns: Mapping[str, Tensor]
    temperature: float
    part: Part | None = None
    repeated: Repeated | None = None

    def cells_of(self, shard: SequenceShard, tp_rank: int) -> Tensor:
        """Take the part of `cells` whose hidden states a tensor-parallel rank has within the layers."""
        return self.cells.view(shard.tp, -1)[tp_rank if shard.tp > 1 else 0]

    def at_own_tokens(self) -> Mapping[str, Tensor]:
        """Take the values of `columns` at this rank's trained tokens, float32 [R] each."""
        if self.part is None:
            return self.columns
        return {name: values[self.part.tokens] for name, values in self.columns.items()}


@dataclass(frozen=True, kw_only=True)
class Repeated:
    """Lists the rows that are taken several times: a prompt's last token, once for each response to it.

    Attributes:
        rows: int64, each of them once.
        places: int64 [P], where they stand among all rows that are taken.
        numbers: int64 [P], the index into `rows` for each place.
    """

    places: Tensor
    numbers: Tensor
    rows: Tensor

    @staticmethod
    def among(taken: Tensor, device: torch.device) -> Repeated | None:
        """Find the repeated rows among rows that are taken, int64 on the host."""
        rows, row_of, counts = taken.unique(return_inverse=True, return_counts=True)
        several = counts > 1
        if not bool(several.any()):
            return None
        places = several[row_of].nonzero().flatten()
        numbers = (several.cumsum(0) - 1)[row_of[places]]
        places, numbers, rows = (upload(x, device) for x in (places, numbers, rows[several]))
        return Repeated(places=places, numbers=numbers, rows=rows)


@dataclass(frozen=True, kw_only=True)
class Part:
    """Places what a context-parallel rank has among all that its micro-batch has.

    Attributes:
        tokens: int64 [R], of its trained tokens.
        sequences: int64 [S], of the sequences whose last token it has.
        group: the ranks that have the other parts.
    """

    tokens: Tensor
    sequences: Tensor
    group: dist.ProcessGroup

    @property
    def is_first(self) -> bool:
        """Say whether this rank reports what all of the group have computed alike."""
        return self.group.rank() == 0

    def gathered(self, values: Tensor, places: Tensor, count: int) -> Tensor:
        """Gather the values of all parts on every rank: float32 [R] or [S] -> [count].

        Every rank of the group calls it. The gradient of a loss that every rank computes of them goes back to the rank
        that has the value.

        Args:
            places: `tokens` or `sequences`.
        """
        gathered: Tensor = _Gathered.apply(values, places, count, self.group)
        return gathered


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, places: Tensor, count: int, group: dist.ProcessGroup) -> Tensor:
        ctx.save_for_backward(places)
        gathered = values.new_zeros(count).index_copy_(0, places, values)
        dist.all_reduce(gathered, group=group)  # one rank has a value, the others 0: no rounding
        return gathered

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (places,) = ctx.saved_tensors
        return grads[0][places], None, None, None


@dataclass(frozen=True, kw_only=True)
class SequenceShard:
    """Says how the columns of a micro-batch are cut over ranks: first over context-parallel ones, then within those.

    Attributes:
        tp: tensor-parallel ranks that have a part each (sequence parallelism); 1: each has all.
        cp: the ranks that have a part each; None: there is no context parallelism.
        context: which parts, and how they attend.
    """

    tp: int = 1
    cp: dist.ProcessGroup | None = None
    context: ContextKind = ALL_TO_ALL

    @staticmethod
    def of(groups: TrainGroups, *, sequence_parallel: bool) -> SequenceShard:
        """Say how the ranks of a layout cut micro-batches."""
        layout = groups.layout
        cp = groups.pgs.cp if layout.shares_sequences else None
        return SequenceShard(tp=layout.tp if sequence_parallel else 1, cp=cp, context=layout.context)

    def padded(self, length: int) -> int:
        """Round a length up, so that all ranks have equally much; at least one token each."""
        parts = self.tp * (1 if self.cp is None else self.cp.size() * self.context.pieces)
        return -(-max(1, length) // parts) * parts

    def own(self, length: int) -> tuple[int, int]:
        """Find the first of a padded length's columns that this rank has, and the one after the last."""
        if self.cp is None:
            return 0, length
        each = length // self.cp.size()
        return self.cp.rank() * each, (self.cp.rank() + 1) * each

    def columns(self, length: int) -> Tensor:
        """Place the tokens of a packed row of a padded length where the ranks have them: int64 [length]."""
        places = torch.arange(length)
        if self.cp is None or self.context.pieces == 1:
            return places
        first, second = places.view(self.cp.size(), 2, -1).unbind(1)  # pieces of each rank
        return torch.cat((first, second.flip(0))).flatten()


@dataclass(frozen=True, kw_only=True)
class _Grid:
    """Lays T tokens out in B rows of L columns.

    Attributes:
        shape: B and L.
        row, column: int64 [T].
    """

    shape: tuple[int, int]
    row: Tensor
    column: Tensor

    @staticmethod
    def padded(lengths: Tensor, sequence: Tensor, positions: Tensor, shard: SequenceShard) -> _Grid:
        """Lay each sequence out in a row of its own, as long as the longest one."""
        assert not shard.context.no_padding, shard.context.no_padding
        longest = shard.padded(max(lengths.tolist(), default=0))
        return _Grid(shape=(max(1, len(lengths)), longest), row=sequence, column=positions)

    def laid_out(self, values: Tensor) -> Tensor:
        """Lay out int64 [T] as [B, L]; padding is 0."""
        cells = torch.zeros(self.shape, dtype=torch.int64)
        cells[self.row, self.column] = values
        return cells

    @property
    def flat(self) -> Tensor:
        """Return the positions of the tokens in the flattened hidden states, which come as [L, B, hidden]."""
        return self.column * self.shape[0] + self.row


def _own(flat: Tensor, begin: int, end: int) -> tuple[Tensor, Tensor]:
    """Find the positions within a range of the flattened states: counted from its begin, and which those were."""
    which = ((flat >= begin) & (flat < end)).nonzero().flatten()
    return flat[which] - begin, which


def _part(tokens: Tensor, sequences: Tensor, shard: SequenceShard, device: torch.device) -> Part | None:
    if shard.cp is None:
        return None
    return Part(tokens=upload(tokens, device), sequences=upload(sequences, device), group=shard.cp)


@dataclass(frozen=True, kw_only=True)
class _Prompts:
    """Knows which tokens of a micro-batch's sequences, one after another, a row has.

    Attributes:
        kept: int64, which of the T tokens it has: not those of a prompt that the sequence before has, too.
        rows: int64 [T], where each token lies in it.
        own: how many tokens it has for each sequence alone.
    """

    kept: Tensor
    rows: Tensor
    own: list[int]

    @staticmethod
    def of(batch: Batch, sequences: Sequence[int], lengths: list[int], *, share: bool) -> _Prompts:
        """Find the prompts, up to the first trained token, that neighbours have in common."""
        everything = torch.arange(sum(lengths))
        if not share:
            return _Prompts(kept=everything, rows=everything, own=lengths)
        kept, source, own = torch.ones(len(everything), dtype=torch.bool), everything.clone(), []
        leader, begin, before = 0, 0, [torch.empty(0)]
        for i, length in zip(sequences, lengths, strict=True):
            prompt = batch.prompt(i)
            size = len(prompt[0])
            if size and size == len(before[0]) and all(map(torch.equal, prompt, before)):
                kept[begin : begin + size] = False
                source[begin : begin + size] = everything[leader : leader + size]
                own.append(length - size)
            else:
                leader, before = begin, prompt
                own.append(length)
            begin += length
        return _Prompts(kept=everything[kept], rows=(kept.cumsum(0) - 1)[source], own=own)

    @property
    def shares(self) -> bool:
        return len(self.kept) < len(self.rows)


def _laid_out(
    lengths: list[int], positions: Tensor, prompts: _Prompts, shard: SequenceShard, device: torch.device
) -> tuple[_Grid, PackedSequences]:
    """Put all tokens that are kept into one row, whose padding is a sequence of its own.

    Args:
        positions: int64 [T], of the sequences' tokens, one sequence after another.
    """
    count = len(prompts.kept)
    total = shard.padded(count)
    columns = shard.columns(total)
    grid = _Grid(shape=(1, total), row=torch.zeros(count, dtype=torch.int64), column=columns[:count])
    padding = [total - count] if total > count else []
    if not prompts.shares and shard.context.splits_heads:
        return grid, packed_sequences([*lengths, *padding], device, shard.own(total))
    filling, own = torch.arange(total - count), slice(*shard.own(total))
    counts = [*prompts.own, *padding], [*lengths, *padding]
    rows = torch.cat((prompts.rows, count + filling))
    positions = torch.cat((positions[prompts.kept], filling))
    if not shard.context.splits_heads:
        return grid, queries_of_a_rank(*counts, columns[rows], positions, columns.argsort()[own], device)
    return grid, queries_with_keys(*counts, rows, positions[own], device)


def _check_first(is_trained: Tensor) -> None:
    """Refuse training on a sequence's first token."""
    if bool(is_trained.any()):
        raise ValueError("a sequence's first token is to be trained, but no token precedes it: begin with a prompt")


def make_micro_batch(
    batch: Batch,
    sequences: Sequence[int],
    *,
    packed: bool,
    shard: SequenceShard,
    device: torch.device,
    share_prompts: bool = False,
    columns: Mapping[str, Tensor] | None = None,
    sequence_columns: Mapping[str, Tensor] | None = None,
) -> MicroBatch:
    """Collate some sequences of a batch.

    Args:
        sequences: indices into the batch; may be empty, for ranks that have fewer micro-batches than others.
        packed: one row of all tokens, or one padded row per sequence.
        shard: L is padded for it.
        share_prompts: a packed row has the prompt of neighbours with the same one once.
        columns: float32 [T] each, on the host, of which the micro-batch gets the values of its trained tokens: the
            whole step's would not fit on the device.
        sequence_columns: [N] each, of which it gets the values of its sequences.
    """
    places = torch.tensor(list(sequences), dtype=torch.int64)
    starts, lengths = batch.starts[places], batch.lengths[places]
    ends = lengths.cumsum(0)
    sequence = torch.repeat_interleave(torch.arange(len(places)), lengths)
    positions = torch.arange(len(sequence)) - (ends - lengths)[sequence]
    tokens = starts[sequence] + positions  # in the batch
    is_trained = batch.response_mask[tokens]
    _check_first(is_trained[(ends - lengths)[lengths > 0]])
    index = tokens[is_trained]
    prompts = _Prompts.of(batch, sequences, lengths.tolist(), share=share_prompts and packed)
    if packed:
        grid, description = _laid_out(lengths.tolist(), positions, prompts, shard, device)
    else:
        grid, description = _Grid.padded(lengths, sequence, positions, shard), None
    rows, (first, after) = grid.shape[0], shard.own(grid.shape[1])
    begin, end = first * rows, after * rows
    cells = torch.full((rows * grid.shape[1],), -1).index_copy_(0, grid.flat, tokens[prompts.kept])
    trained = torch.zeros_like(places).index_add_(0, sequence, is_trained.long())
    flat = grid.flat[prompts.rows]
    predictors, own_tokens = _own(flat[is_trained.nonzero().flatten() - 1], begin, end)
    last, own_sequences = _own(flat[ends - 1], begin, end)
    return MicroBatch(
        tokens=upload(grid.laid_out(batch.tokens[tokens[prompts.kept]])[:, first:after], device),
        position_ids=upload(grid.laid_out(positions[prompts.kept])[:, first:after], device),
        packed=description,
        predictors=upload(predictors, device),
        labels=upload(batch.tokens[index[own_tokens]], device),
        index=index[own_tokens],
        cells=cells[begin:end],
        last=upload(last, device),
        sequences=places[own_sequences],
        trained=upload(trained, device),
        columns={name: upload(values[index], device) for name, values in (columns or {}).items()},
        sequence_columns={name: upload(values[places], device) for name, values in (sequence_columns or {}).items()},
        temperature=batch.temperature,
        part=_part(own_tokens, own_sequences, shard, device),
        repeated=Repeated.among(predictors, device) if prompts.shares else None,
    )
