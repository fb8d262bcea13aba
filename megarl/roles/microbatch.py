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
    """One forward pass. R trained tokens; L tokens in B rows (B = 1 when packed).

    Attributes:
        tokens: int64 [B, L].
        position_ids: int64 [B, L].
        packed: where the sequences lie in the row, or None when each has a row of its own.
        predictors: int64 [R], positions in the flattened [L * B] hidden states that predict the trained tokens.
        labels: int64 [R], those tokens.
        index: int64 [R], their places in `Batch.tokens`; on the host.
        columns: float32 [R] each, per-token values of the batch at those places.
    """

    tokens: Tensor
    position_ids: Tensor
    packed: PackedSequences | None
    predictors: Tensor
    labels: Tensor
    index: Tensor
    columns: Mapping[str, Tensor]


def make_micro_batch(
    batch: Batch,
    sequences: Sequence[int],
    *,
    packed: bool,
    multiple_of: int,
    device: torch.device,
    columns: Mapping[str, Tensor] | None = None,
) -> MicroBatch:
    """Collate some sequences of a batch.

    Args:
        sequences: indices into the batch; may be empty, for ranks that have fewer micro-batches than others.
        packed: one row of all tokens, or one padded row per sequence.
        multiple_of: L is a multiple of this (sequence parallelism splits it over the tensor-parallel ranks).
        columns: float32 [T] each, on the host, of which the micro-batch gets the values of its trained tokens: the
            whole step's would not fit on the device.
    """
    starts = [int(batch.cu_seqlens[i]) for i in sequences]
    lengths = [int(batch.cu_seqlens[i + 1]) - s for i, s in zip(sequences, starts, strict=True)]
    source = torch.cat([torch.arange(s, s + n) for s, n in zip(starts, lengths, strict=True)] or [torch.arange(0)])
    positions = torch.cat([torch.arange(n) for n in lengths] or [torch.arange(0)])
    trained = batch.response_mask[source]
    index = source[trained]
    if packed:
        total = -(-max(1, sum(lengths)) // multiple_of) * multiple_of
        padding = total - sum(lengths)
        row, column = torch.zeros_like(positions), torch.arange(len(positions))
        shape = (1, total)
        described = packed_sequences([*lengths, *([padding] if padding else [])], device)
    else:
        longest = -(-max(lengths, default=1) // multiple_of) * multiple_of
        row = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths, dtype=torch.int64))
        column = positions
        shape = (max(1, len(lengths)), longest)
        described = None
    tokens, position_ids = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.int64)
    tokens[row, column] = batch.tokens[source]
    position_ids[row, column] = positions
    # hidden states come as [L, B, hidden]: the predictor of the token at (row, column) is at (column - 1, row)
    flat = (column - 1) * shape[0] + row
    return MicroBatch(
        tokens=upload(tokens, device),
        position_ids=upload(position_ids, device),
        packed=described,
        predictors=upload(flat[trained], device),
        labels=upload(batch.tokens[index], device),
        index=index,
        columns={name: upload(values[index], device) for name, values in (columns or {}).items()},
    )
