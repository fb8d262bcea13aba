"""Rotates channels with a Triton kernel for `megarl.models.rope.apply_rope`: both halves in one pass, in fp32."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor


def apply_rope(x: Tensor, cos_sin: Tensor) -> Tensor:
    """See `megarl.models.rope.apply_rope`."""
    return _Rotation.apply(x, cos_sin)


class _Rotation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos_sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos_sin)
        return _rotated(x, cos_sin, 1.0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (cos_sin,) = ctx.saved_tensors
        return _rotated(grad, cos_sin, -1.0), None


def _rotated(x: Tensor, cos_sin: Tensor, direction: float) -> Tensor:
    """Rotate x by the angles (direction 1) or back (-1); the result is contiguous."""
    (tokens, heads, dim), half = x.shape, cos_sin.shape[-1]
    assert cos_sin.is_contiguous()
    x = x if x.stride(2) == 1 else x.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if tokens:
        _rotate[(tokens,)](
            x,
            cos_sin,
            out,
            x.stride(0),
            x.stride(1),
            heads,
            direction,
            DIM=dim,
            HALF=half,
            HEADS=triton.next_power_of_2(heads),
            COLUMNS=triton.next_power_of_2(half),
            REST=triton.next_power_of_2(dim - 2 * half),
            num_warps=4,
        )
    return out


@triton.jit
def _rotate(
    x,
    cos_sin,
    out,
    token_stride,
    head_stride,
    heads,
    direction,
    DIM: tl.constexpr,
    HALF: tl.constexpr,
    HEADS: tl.constexpr,
    COLUMNS: tl.constexpr,
    REST: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head, column = tl.arange(0, HEADS)[:, None], tl.arange(0, COLUMNS)[None, :]
    there = column < HALF
    cos = tl.load(cos_sin + token * 2 * HALF + column, mask=there)
    sin = tl.load(cos_sin + token * 2 * HALF + HALF + column, mask=there) * direction
    there = there & (head < heads)
    first = x + token * token_stride + head * head_stride + column
    a = tl.load(first, mask=there).to(tl.float32)
    b = tl.load(first + HALF, mask=there).to(tl.float32)
    to = out + token * heads * DIM + head * DIM + column
    tl.store(to, (a * cos - b * sin).to(out.dtype.element_ty), mask=there)
    tl.store(to + HALF, (b * cos + a * sin).to(out.dtype.element_ty), mask=there)
    if 2 * HALF < DIM:  # the rest of each head stays as it is
        column = 2 * HALF + tl.arange(0, REST)[None, :]
        there = (column < DIM) & (head < heads)
        kept = tl.load(x + token * token_stride + head * head_stride + column, mask=there)
        tl.store(out + token * heads * DIM + head * DIM + column, kept, mask=there)
