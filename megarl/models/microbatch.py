"""Sequences of a batch -> the tensors of one forward pass, packed or padded."""

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
    """One forward pass over S sequences with R trained tokens; L tokens in B rows (B = 1 when packed).

    Attributes:
        tokens: int64 [B, L].
        position_ids: int64 [B, L].
        packed: where the sequences lie in the row, or None when each has a row of its own.
        predictors: int64 [R], positions in the flattened [L * B] hidden states that predict the trained tokens.
        labels: int64 [R], those tokens.
        index: int64 [R], their places in `Batch.tokens`; on the host.
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
    last: Tensor
    sequences: Tensor
    trained: Tensor
    columns: Mapping[str, Tensor]
    sequence_columns: Mapping[str, Tensor]
    temperature: float


def make_micro_batch(
    batch: Batch,
    sequences: Sequence[int],
    *,
    packed: bool,
    multiple_of: int,
    device: torch.device,
    columns: Mapping[str, Tensor] | None = None,
    sequence_columns: Mapping[str, Tensor] | None = None,
) -> MicroBatch:
    """Collate some sequences of a batch.

    Args:
        sequences: indices into the batch; may be empty, for ranks that have fewer micro-batches than others.
        packed: one row of all tokens, or one padded row per sequence.
        multiple_of: L is a multiple of this (sequence parallelism splits it over the tensor-parallel ranks).
        columns: float32 [T] each, on the host, of which the micro-batch gets the values of its trained tokens: the
            whole step's would not fit on the device.
        sequence_columns: [N] each, of which it gets the values of its sequences.
    """
    starts = [int(batch.cu_seqlens[i]) for i in sequences]
    lengths = [int(batch.cu_seqlens[i + 1]) - s for i, s in zip(sequences, starts, strict=True)]
    source = torch.cat([torch.arange(s, s + n) for s, n in zip(starts, lengths, strict=True)] or [torch.arange(0)])
    positions = torch.cat([torch.arange(n) for n in lengths] or [torch.arange(0)])
    sizes = torch.tensor(lengths, dtype=torch.int64)
    of_sequence = torch.repeat_interleave(torch.arange(len(lengths)), sizes)
    is_trained = batch.response_mask[source]
    index = source[is_trained]
    if packed:
        total = -(-max(1, sum(lengths)) // multiple_of) * multiple_of
        padding = total - sum(lengths)
        row, column = torch.zeros_like(positions), torch.arange(len(positions))
        shape = (1, total)
        described = packed_sequences([*lengths, *([padding] if padding else [])], device)
    else:
        longest = -(-max(lengths, default=1) // multiple_of) * multiple_of
        row, column = of_sequence, positions
        shape = (max(1, len(lengths)), longest)
        described = None
    tokens, position_ids = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.int64)
    tokens[row, column] = batch.tokens[source]
    position_ids[row, column] = positions
    # hidden states come as [L, B, hidden]: the predictor of the token at (row, column) is at (column - 1, row)
    flat = (column - 1) * shape[0] + row
    ends = sizes.cumsum(0) - 1
    which = torch.tensor(list(sequences), dtype=torch.int64)
    trained = torch.zeros_like(which).index_add_(0, of_sequence, is_trained.long())
    return MicroBatch(
        tokens=upload(tokens, device),
        position_ids=upload(position_ids, device),
        packed=described,
        predictors=upload(flat[is_trained], device),
        labels=upload(batch.tokens[index], device),
        index=index,
        last=upload(flat[ends] + shape[0], device),
        sequences=which,
        trained=upload(trained, device),
        columns={name: upload(values[index], device) for name, values in (columns or {}).items()},
        sequence_columns={name: upload(values[which], device) for name, values in (sequence_columns or {}).items()},
        temperature=batch.temperature,
    )
