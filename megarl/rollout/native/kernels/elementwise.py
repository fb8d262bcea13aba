"""Computes the operations between the matrix products of a layer, each in one pass over memory."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


def add_and_norm(residual: Tensor, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Compute residual + x, and its RMSNorm, rounded as if one after the other; all [T, width], weight [width]."""
    assert residual.is_contiguous() and x.is_contiguous()
    rows, width = x.shape
    total, normed = torch.empty_like(x), torch.empty_like(x)
    _add_and_norm[(rows,)](
        residual, x, weight, total, normed, width, eps, WIDTH=triton.next_power_of_2(width), num_warps=8
    )
    return total, normed


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """Compute silu(gate) * up: [T, 2 * width] -> [T, width]."""
    assert gate_up.is_contiguous()
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, width)
    _silu_and_mul[(rows, triton.cdiv(width, 1024))](gate_up, out, width, BLOCK=1024)
    return out


@triton.jit
def _add_and_norm(residual, x, weight, total, normed, width, eps, WIDTH: tl.constexpr):
    column = tl.arange(0, WIDTH)
    inside = column < width
    at = tl.program_id(0).to(tl.int64) * width + column
    left = tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
    right = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    rounded = (left + right).to(total.dtype.element_ty)
    tl.store(total + at, rounded, mask=inside)
    value = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, axis=0) / width + eps)
    weights = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(normed + at, (value * scale * weights).to(normed.dtype.element_ty), mask=inside)


@triton.jit
def _silu_and_mul(gate_up, out, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    gate = tl.load(gate_up + row * 2 * width + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * width + width + column, mask=inside, other=0.0).to(tl.float32)
    silu = (gate / (1.0 + tl.exp(-gate))).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * width + column, (silu * up).to(out.dtype.element_ty), mask=inside)
