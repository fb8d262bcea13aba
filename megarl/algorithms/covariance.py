"""How a token's log-probability goes with its advantage: what lowers the policy's entropy (arXiv 2505.22617)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megarl.types import Batch


def covariances(batch: Batch, sequences: Sequence[int]) -> tuple[Tensor, Tensor]:
    """(log p - mean log p) (A - mean A) of each trained token of a mini-batch (arXiv 2505.22617, section 4.2).

    `old_logp` stands for the current policy: which tokens are chosen is known before the update, and does not depend
    on how it is cut into micro-batches.

    Args:
        sequences: indices of the mini-batch's sequences, in any order.

    Returns:
        places: int64 [n], of its trained tokens that are not rejected, ascending.
        covariances: float64 [n], nats.
    """
    assert batch.old_logp is not None and batch.advantages is not None
    chosen = torch.zeros(len(batch), dtype=torch.bool)
    chosen[list(sequences)] = True
    token = batch.response_mask & chosen[batch.sequence_of_token]
    if batch.importance is not None:
        token &= batch.importance > 0
    logp, advantages = batch.old_logp[token].double(), batch.advantages[token].double()
    return token.nonzero().squeeze(1), (logp - logp.mean()) * (advantages - advantages.mean())


def with_selected(batch: Batch, places: Tensor) -> Batch:
    """The batch with `selected`, 1 at the given tokens."""
    return batch.with_(selected=torch.zeros(len(batch.tokens)).index_fill_(0, places, 1.0))
