"""Computes the operations between the matrix products of a layer: in plain torch, or in one kernel each on a GPU."""

from __future__ import annotations

from torch import Tensor

from megarl.models.activations import ACTIVATIONS
from megarl.models.rms_norm import rms_norm
from megarl.rollout.native import kernels


def add_and_norm(
    residual: Tensor, x: Tensor, weight: Tensor, eps: float, *, zero_centered: bool = False
) -> tuple[Tensor, Tensor]:
    """Compute residual + x, and its RMSNorm; all [T, width], weight [width]."""
    if kernels.on(x.device) and not zero_centered:
        from megarl.rollout.native.kernels import elementwise

        return elementwise.add_and_norm(residual, x, weight, eps)
    total = residual + x
    return total, rms_norm(total, weight, eps, zero_centered=zero_centered)


def activate_and_mul(gate_up: Tensor, activation: str) -> Tensor:
    """Compute activation(gate) * up: [T, 2 * width] -> [T, width]."""
    if kernels.on(gate_up.device) and activation == "silu":
        from megarl.rollout.native.kernels import elementwise

        return elementwise.silu_and_mul(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return ACTIVATIONS[activation](gate).mul_(up)
