"""Advantages of mean 0 and standard deviation 1 over a batch."""

from __future__ import annotations

import torch
from torch import Tensor

from megarl.types import Batch


def whitened(batch: Batch, per_token: Tensor, eps: float = 1e-8) -> Tensor:
    """(x - mean) / sqrt(variance + eps) over all trained tokens of the batch, as in PPO for RLHF (arXiv 1909.08593).

    The variance is unbiased, the arithmetic float64.

    Args:
        per_token: [T].

    Returns:
        float32 [T], 0 where nothing is trained, and exactly 0 everywhere if all trained tokens have the same value.
    """
    trained = per_token[batch.response_mask].double()
    out = torch.zeros(len(per_token))
    if len(trained) and trained.min() < trained.max():
        centred = trained - trained.mean()
        variance = centred.square().sum() / (len(trained) - 1)
        out[batch.response_mask] = (centred / (variance + eps).sqrt()).float()
    return out
