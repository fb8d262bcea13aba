"""Turns token losses into one number: every mode is a weight per token, which contains the global denominator."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megarl.config.fields import LossAggMode
from megarl.types import Batch


def token_weights(
    batch: Batch, sequences: Sequence[int], mode: LossAggMode = "token-mean", max_response_length: int = 1
) -> Tensor:
    """Compute weights w with loss = sum(w * token_loss) over a mini-batch, however it is split afterwards.

    Args:
        sequences: indices of the mini-batch's sequences, over all data-parallel ranks.
        mode: `token-mean` averages over all tokens (DAPO, arXiv 2503.14476, eq. 8); `seq-mean-token-mean` averages
            per sequence, then over sequences (GRPO, arXiv 2402.03300, eq. 3); `seq-mean-token-sum` sums per
            sequence; `seq-mean-token-sum-norm` divides that by `max_response_length` (Dr. GRPO, arXiv 2503.20783).
        max_response_length: tokens; for `seq-mean-token-sum-norm`.

    Returns:
        float32 [T], 0 outside the mini-batch and at prompt tokens. With `importance` each token's weight is
        multiplied by its importance weight, and rejected tokens count in no denominator.
    """
    token = batch.response_mask.float() if batch.importance is None else batch.importance
    lengths = batch.sum_per_sequence((token > 0).float())
    chosen = torch.zeros(len(batch))
    chosen[torch.tensor(list(sequences), dtype=torch.int64)] = 1.0
    chosen *= lengths > 0
    per_sequence = chosen / chosen.sum().clamp_min(1.0)
    if mode == "token-mean":
        per_sequence = chosen / (chosen * lengths).sum().clamp_min(1.0)
    elif mode == "seq-mean-token-mean":
        per_sequence = per_sequence / lengths.clamp_min(1.0)
    elif mode == "seq-mean-token-sum-norm":
        per_sequence = per_sequence / max_response_length
    return batch.spread(per_sequence) * token
