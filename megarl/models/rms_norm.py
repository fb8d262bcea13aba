"""Computes RMSNorm (arXiv 1910.07467), with a weight or, zero-centered, with 1 + weight."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, zero_centered: bool) -> Tensor:
    """Normalise the last axis: x [..., width], weight [width].

    1 + weight is float32: in bfloat16 it would round a small weight to a multiple of 1/128.
    """
    if not zero_centered:
        return F.rms_norm(x, weight.shape, weight, eps)
    return F.rms_norm(x.float(), weight.shape, 1 + weight.float(), eps).to(x.dtype)


def norm_over_heads(x: Tensor, weight: Tensor, eps: float, mean_over_ranks: Callable[[Tensor], Tensor]) -> Tensor:
    """Normalise the channels of all heads together, of which each tensor-parallel rank has equally many.

    Ranks may have the same heads, as long as all heads are on equally many ranks.

    Args:
        x: [..., heads, width], of the rank's heads.
        weight: [heads * width], of the rank's heads.
        mean_over_ranks: of the heads of each rank to those of all.
    """
    exact = x.float()
    square = mean_over_ranks(exact.square().mean((-2, -1), keepdim=True))
    return (exact * torch.rsqrt(square + eps) * weight.view(x.shape[-2:]).float()).to(x.dtype)
