"""Collates sequences of a batch into the tensors of one forward pass, packed or padded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megarl.models.attention import PackedSequences, packed_sequences
from megarl.parallel.upload import upload
from megarl.types import Batch


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """Holds one forward pass over S sequences with R trained tokens; L tokens in B rows (B = 1 when packed).

    Attributes:
        tokens: int64 [B, L].
        position_ids: int64 [B, L].
        packed: where the sequences lie in the row, or None when each has a row of its own.
        predictors: int64 [R], positions in the flattened [L * B] hidden states that predict the trained tokens.
        labels: int64 [R], those tokens.
        index: int64 [R], their places in `Batch.tokens`; on the host.
        cells: int64 [L * B], the places in `Batch.tokens` of the flattened positions, -1 at padding; on the host.
        last: int64 [S], positions in the flattened hidden states of each sequence's last token.
        sequences: int64 [S], their places in the batch; on the host.
        trained: int64 [S], trained tokens of each sequence.
        columns: float32 [R] each, values of the batch at those tokens.
        sequence_columns: float32 [S] each, values of the batch for those sequences.
        temperature: `Batch.temperature`.
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


@dataclass(frozen=True, kw_only=True)
class SequenceShard:
    """Says how the L columns of a micro-batch are cut over ranks.

    Attributes:
        tp: tensor-parallel ranks that have a part each (sequence parallelism); 1: each has all.
    """

    tp: int = 1

    def padded(self, length: int) -> int:
        """Round a length up, so that all ranks have equally much; at least one token each."""
        return -(-max(1, length) // self.tp) * self.tp


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

    def laid_out(self, values: Tensor) -> Tensor:
        """Lay out int64 [T] as [B, L]; padding is 0."""
        cells = torch.zeros(self.shape, dtype=torch.int64)
        cells[self.row, self.column] = values
        return cells

    @property
    def flat(self) -> Tensor:
        """Positions of the tokens in the flattened hidden states, which come as [L, B, hidden]."""
        return self.column * self.shape[0] + self.row


def make_micro_batch(
    batch: Batch,
    sequences: Sequence[int],
    *,
    packed: bool,
    shard: SequenceShard,
    device: torch.device,
    columns: Mapping[str, Tensor] | None = None,
    sequence_columns: Mapping[str, Tensor] | None = None,
) -> MicroBatch:
    """Collate some sequences of a batch.

    Args:
        sequences: indices into the batch; may be empty, for ranks that have fewer micro-batches than others.
        packed: one row of all tokens, or one padded row per sequence.
        shard: L is padded for it.
        columns: float32 [T] each, on the host, of which the micro-batch gets the values of its trained tokens: the
            whole step's would not fit on the device.
        sequence_columns: [N] each, of which it gets the values of its sequences.
    """
    places = torch.tensor(list(sequences), dtype=torch.int64)
    starts, lengths = batch.cu_seqlens[places], batch.lengths[places]
    ends = lengths.cumsum(0)
    sequence = torch.repeat_interleave(torch.arange(len(places)), lengths)
    positions = torch.arange(len(sequence)) - (ends - lengths)[sequence]
    tokens = starts[sequence] + positions  # in the batch
    is_trained = batch.response_mask[tokens]
    index = tokens[is_trained]
    description = None
    if packed:
        total = shard.padded(len(tokens))
        grid = _Grid(shape=(1, total), row=torch.zeros_like(positions), column=torch.arange(len(tokens)))
        padding = [total - len(tokens)] if total > len(tokens) else []
        description = packed_sequences([*lengths.tolist(), *padding], device)
    else:
        longest = shard.padded(max(lengths.tolist(), default=0))
        grid = _Grid(shape=(max(1, len(places)), longest), row=sequence, column=positions)
    cells = torch.full((grid.shape[0] * grid.shape[1],), -1).index_copy_(0, grid.flat, tokens)
    trained = torch.zeros_like(places).index_add_(0, sequence, is_trained.long())
    return MicroBatch(
        tokens=upload(grid.laid_out(batch.tokens[tokens]), device),
        position_ids=upload(grid.laid_out(positions), device),
        packed=description,
        predictors=upload(grid.flat[is_trained] - grid.shape[0], device),  # a token's predictor is one column before
        labels=upload(batch.tokens[index], device),
        index=index,
        cells=cells,
        last=upload(grid.flat[ends - 1], device),
        sequences=places,
        trained=upload(trained, device),
        columns={name: upload(values[index], device) for name, values in (columns or {}).items()},
        sequence_columns={name: upload(values[places], device) for name, values in (sequence_columns or {}).items()},
        temperature=batch.temperature,
    )
