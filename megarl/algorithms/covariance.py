"""Computes covariances of log-probabilities and advantages, which lower the entropy (arXiv 2505.22617)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megarl.types import Batch


def covariances(batch: Batch, sequences: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Compute (log p - mean log p) (A - mean A) of a mini-batch's trained tokens (arXiv 2505.22617, section 4.2).

    `old_logp` stands for the current policy, so that a choice of tokens is known before the update, and does not
    depend on how it is cut into micro-batches.

    Args:
        sequences: indices of the mini-batch's sequences, in any order.

    Returns:
        places: int64 [n], places of the mini-batch's tokens, but rejected ones, among the step's R trained; ascending.
        covariances: float64 [n], nats.
    """
    assert batch.old_logp is not None and batch.advantages is not None
    chosen = torch.zeros(len(batch), dtype=torch.bool)
    chosen[list(sequences)] = True
    token = batch.trained(batch.spread(chosen))
    if batch.importance is not None:
        token &= batch.trained(batch.importance) > 0
    logp, advantages = (batch.trained(column)[token].double() for column in (batch.old_logp, batch.advantages))
    return token.nonzero().squeeze(1), (logp - logp.mean()) * (advantages - advantages.mean())


def with_selected(batch: Batch, places: Tensor) -> Batch:
    """Add `selected` to a batch: 1 at the given places among its R trained tokens."""
    selected = torch.zeros(int(batch.response_lengths.sum())).index_fill_(0, places, 1.0)
    return batch.with_(selected=batch.at_trained(selected))
