"""Whitens advantages: mean 0 and standard deviation 1 over a batch."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megarl.algorithms.over_tokens import count, extremes, mean, variance
from megarl.types import Batch


def whitened(batch: Batch, x: Tensor, eps: float = 1e-8) -> Tensor:
    """Compute (x - mean) / sqrt(variance + eps), the variance unbiased, as in PPO for RLHF (arXiv 2403.17031).

    Args:
        x: float64 [R], at the trained tokens of the batch that this rank has.

    Returns:
        float64 [R], exactly 0 if all values are the same.
    """
    if not count(batch):
        return x
    least, largest = extremes(batch, x)
    if least == largest:
        return torch.zeros_like(x)
    return (x - mean(batch, x)) / math.sqrt(variance(batch, x, correction=1) + eps)
