"""Advantages of mean 0 and standard deviation 1 over a batch."""

from __future__ import annotations

import torch
from torch import Tensor


def whitened(x: Tensor, eps: float = 1e-8) -> Tensor:
    """(x - mean) / sqrt(variance + eps), the variance unbiased, as in PPO for RLHF (arXiv 2403.17031).

    Args:
        x: float64 [R], at all trained tokens of a batch.

    Returns:
        float64 [R], exactly 0 if all values are the same.
    """
    if not len(x) or x.min() == x.max():
        return torch.zeros_like(x)
    centred = x - x.mean()
    return centred / (centred.square().sum() / (len(x) - 1) + eps).sqrt()
