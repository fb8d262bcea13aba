"""Computes the operations between the matrix products of a layer: in plain torch, or in one kernel each on a GPU."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from megarl.rollout.native import kernels


def add_and_norm(residual: Tensor, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Compute residual + x, and its RMSNorm; all [T, width], weight [width]."""
    if kernels.on(x.device):
        from megarl.rollout.native.kernels import elementwise

        return elementwise.add_and_norm(residual, x, weight, eps)
    total = residual + x
    return total, F.rms_norm(total, weight.shape, weight, eps)


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """Compute silu(gate) * up: [T, 2 * width] -> [T, width]."""
    if kernels.on(gate_up.device):
        from megarl.rollout.native.kernels import elementwise

        return elementwise.silu_and_mul(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)
