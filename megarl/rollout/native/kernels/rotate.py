"""Rotates queries and keys, and puts keys and values into the KV cache, in one pass over memory."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from megarl.models.sizes import BLOCK_SIZE


def rotate_and_store(
    q: Tensor, k: Tensor, v: Tensor, rope: Tensor, *, keys: Tensor, values: Tensor, positions: Tensor, blocks: Tensor
) -> Tensor:
    """Rotate queries and keys, and put keys and values at their place in the cache.

    Args:
        q: [T, heads, head_dim]; the last two axes dense, as k's and v's.
        k, v: [T, kv_heads, head_dim].
        rope: [positions, 2, rotary_dim / 2].
        keys, values: [blocks, kv_heads, BLOCK_SIZE, head_dim], written to.
        positions, blocks: int64 [T], where each token is in its sequence, and the block it goes to.

    Returns: the rotated queries, [T, heads, head_dim], dense.
    """
    (rows, heads, dim), kv_heads, half = q.shape, k.shape[1], rope.shape[-1]
    assert positions.stride() == blocks.stride()
    assert all(x.stride()[1:] == (dim, 1) for x in (q, k, v))
    out = q.new_empty(rows, heads, dim)
    _rotate_and_store[(rows,)](
        q,
        k,
        v,
        rope,
        positions,
        blocks,
        out,
        keys,
        values,
        q.stride(0),
        k.stride(0),
        v.stride(0),
        positions.stride(0),
        HEADS=heads,
        KV_HEADS=kv_heads,
        DIM=dim,
        HALF=half,
        BLOCK_SIZE=BLOCK_SIZE,
        HEADS_2=triton.next_power_of_2(heads),
        KV_HEADS_2=triton.next_power_of_2(kv_heads),
        DIM_2=triton.next_power_of_2(dim),
        HALF_2=triton.next_power_of_2(half),
        REST_2=triton.next_power_of_2(dim - 2 * half),
    )
    return out


@triton.jit
def _rotate_and_store(
    q,
    k,
    v,
    rope,
    positions,
    blocks,
    out,
    keys,
    values,
    q_stride,
    k_stride,
    v_stride,
    place_stride,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEADS_2: tl.constexpr,
    KV_HEADS_2: tl.constexpr,
    DIM_2: tl.constexpr,
    HALF_2: tl.constexpr,
    REST_2: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    position = tl.load(positions + row * place_stride)
    block = tl.load(blocks + row * place_stride)
    column = tl.arange(0, HALF_2)[None, :]
    cos = tl.load(rope + position * 2 * HALF + column, mask=column < HALF, other=0.0).to(tl.float32)
    sin = tl.load(rope + position * 2 * HALF + HALF + column, mask=column < HALF, other=0.0).to(tl.float32)

    head = tl.arange(0, HEADS_2)[:, None]
    inside = (head < HEADS) & (column < HALF)
    at = head * DIM + column
    a = tl.load(q + row * q_stride + at, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(q + row * q_stride + at + HALF, mask=inside, other=0.0).to(tl.float32)
    to = out + row * HEADS * DIM + at
    tl.store(to, (a * cos - b * sin).to(out.dtype.element_ty), mask=inside)
    tl.store(to + HALF, (b * cos + a * sin).to(out.dtype.element_ty), mask=inside)
    if 2 * HALF < DIM:  # the rest of each head stays as it is
        _copy(q + row * q_stride + head * DIM, out + (row * HEADS + head) * DIM, head < HEADS, 2 * HALF, DIM, REST_2)

    head = tl.arange(0, KV_HEADS_2)[:, None]
    inside = (head < KV_HEADS) & (column < HALF)
    at = head * DIM + column
    place = ((block * KV_HEADS + head) * BLOCK_SIZE + position % BLOCK_SIZE) * DIM
    a = tl.load(k + row * k_stride + at, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(k + row * k_stride + at + HALF, mask=inside, other=0.0).to(tl.float32)
    tl.store(keys + place + column, (a * cos - b * sin).to(keys.dtype.element_ty), mask=inside)
    tl.store(keys + place + HALF + column, (b * cos + a * sin).to(keys.dtype.element_ty), mask=inside)
    if 2 * HALF < DIM:
        _copy(k + row * k_stride + head * DIM, keys + place, head < KV_HEADS, 2 * HALF, DIM, REST_2)
    _copy(v + row * v_stride + head * DIM, values + place, head < KV_HEADS, 0, DIM, DIM_2)


@triton.jit
def _copy(source, target, there, FIRST: tl.constexpr, LAST: tl.constexpr, COLUMNS: tl.constexpr):
    """Copy columns FIRST to LAST of the heads that are there."""
    column = FIRST + tl.arange(0, COLUMNS)[None, :]
    inside = there & (column < LAST)
    tl.store(target + column, tl.load(source + column, mask=inside), mask=inside)
