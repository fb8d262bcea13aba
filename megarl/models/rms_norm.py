"""Computes RMSNorm (arXiv 1910.07467), with a weight or, zero-centered, with 1 + weight."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, zero_centered: bool) -> Tensor:
    """Normalise the last axis: x [..., width], weight [width].

    1 + weight is float32: in bfloat16 it would round a small weight to a multiple of 1/128.
    """
    if not zero_centered:
        return F.rms_norm(x, weight.shape, weight, eps)
    return F.rms_norm(x.float(), weight.shape, 1 + weight.float(), eps).to(x.dtype)
