"""Attends from one new token per sequence to its blocks of the KV cache (PagedAttention, arXiv 2309.06180).

The softmax is online, in float32. Where there are too few sequences to occupy the GPU, each sequence is split over
several programs whose results are combined afterwards, as in Flash-Decoding (https://pytorch.org/blog/flash-decoding).
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from megarl.models.parts.grouped_query import GroupedQuery
from megarl.models.sizes import BLOCK_SIZE
from megarl.rollout.native.kernels.rotate import rotate_and_store
from megarl.rollout.native.kv_cache import KVCache

TILE = 64
"""A program reads so many tokens at once."""

LOG2_E = tl.constexpr(math.log2(math.e))

SUMS = 8192
"""A program adds up so many numbers of outputs, of several heads: more would not fit into its registers."""

LEAST = 16
"""A matrix product takes so many rows and columns at least."""

PROGRAMS = 512
"""So many programs keep a large GPU busy: about four on each of its multiprocessors."""


class PagedAttention:
    """Lets token i, the newest of the sequence in slots[i], attend to that sequence up to its own position.

    Reads nothing on the host, so that it can be captured in a CUDA graph.

    Args:
        rope: [max_model_len, 2, rotary_dim / 2], as of `rope_table`.
        slots, positions, blocks: int64 [T]; position i goes to blocks[i]. Each is a column of one row-major table.
    """

    def __init__(
        self, kind: GroupedQuery, cache: KVCache, rope: Tensor, *, slots: Tensor, positions: Tensor, blocks: Tensor
    ) -> None:
        self._kind, self._cache, self._rope = kind, cache, rope
        self._slots, self._positions, self._blocks = slots, positions, blocks

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Tensor:
        keys, values = self._cache.layers[layer]
        q = rotate_and_store(
            q, k, v, self._rope, keys=keys, values=values, positions=self._positions, blocks=self._blocks
        )
        out = attend(
            q,
            keys,
            values,
            tables=self._cache.tables,
            slots=self._slots,
            positions=self._positions,
            window=self._kind.sliding_window,
            scale=self._kind.softmax_scale,
            sinks=sinks,
        )
        return out.flatten(1)


def attend(
    q: Tensor,
    keys: Tensor,
    values: Tensor | None,
    *,
    tables: Tensor,
    slots: Tensor,
    positions: Tensor,
    window: int | None = None,
    scale: float | None = None,
    sinks: Tensor | None = None,
    splits: int = 0,
    value_dim: int | None = None,
) -> Tensor:
    """Compute softmax(scale q k^T) v over the positions 0 to positions[i] of the sequence in slots[i].

    Args:
        q: [T, heads, head_dim], rotated and dense.
        keys: [blocks, kv_heads, BLOCK_SIZE, head_dim].
        values: likewise; None: the first `value_dim` channels of the keys, as of absorbed latents.
        tables: int32 [slots, blocks].
        slots, positions: int64 [T].
        window: the last so many of those positions are seen; None: all.
        scale: None: 1 / sqrt(head_dim).
        sinks: [heads], a logit that takes part in each head's softmax, and counts for nothing else.
        splits: programs per sequence and heads that they read keys for; 0 chooses by the number of sequences.
        value_dim: None: head_dim.

    Returns: [T, heads, value_dim].
    """
    assert q.is_contiguous() and slots.stride() == positions.stride()
    (rows, heads, width), kv_heads = q.shape, keys.shape[1]
    dim = value_dim or width
    sizes = dict(DIM=dim, DIM_2=max(triton.next_power_of_2(dim), LEAST))
    programs = _programs(heads // kv_heads, width, **sizes)
    at_once, longest = rows * kv_heads * programs["TILES"], tables.shape[1] * BLOCK_SIZE
    splits = splits or min(max(PROGRAMS // at_once, 1), triton.cdiv(longest, programs["TILE"]))
    out = q.new_empty(rows, heads, dim)
    part, largest, total = _room_for_parts(out, splits)
    read = (q, keys, keys if values is None else values, tables, slots, positions)
    _attend[(rows, kv_heads * programs["TILES"], splits)](
        *read,
        q if sinks is None else sinks,  # without sinks it is not read
        *(out, part, largest, total),
        math.log2(math.e) * (1 / math.sqrt(width) if scale is None else scale),
        longest if window is None else window,
        tables.stride(0),
        slots.stride(0),
        KV_HEADS=kv_heads,
        BLOCK_SIZE=BLOCK_SIZE,
        SINKS=sinks is not None,
        SHARED=values is None,
        SPLITS=splits,
        **programs,
        **sizes,
    )
    if splits > 1:
        splits_2 = triton.next_power_of_2(splits)
        _combine[(rows * heads,)](part, largest, total, out, SPLITS=splits, SPLITS_2=splits_2, **sizes)
    return out


def _programs(group: int, width: int, DIM: int, DIM_2: int) -> dict[str, int]:
    """Choose what a program reads and holds: of `group` heads with one KV head, `width` channels, and DIM of values."""
    members = max(min(triton.next_power_of_2(group), SUMS // DIM_2), LEAST)
    wide = DIM > 256
    return dict(
        WIDTH=width,
        REST_2=max(triton.next_power_of_2(width - DIM), LEAST),
        GROUP=group,
        MEMBERS=members,
        TILES=triton.cdiv(group, members),
        TILE=TILE // 2 if wide else TILE,
        num_warps=4,
        num_stages=2 if wide else 3,
    )


def _room_for_parts(out: Tensor, splits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Take memory for the unscaled output of each part, its largest score and its sum of weights; a single part needs
    none of them."""
    parts = (*out.shape[:2], splits) if splits > 1 else (1, 1, 1)
    part = torch.empty(*parts, out.shape[2], dtype=torch.float32, device=out.device)
    largest, total = (torch.empty(parts, dtype=torch.float32, device=out.device) for _ in range(2))
    return part, largest, total


@triton.jit
def _attend(
    q,
    keys,
    values,
    tables,
    slots,
    positions,
    sinks,
    out,
    part,
    largest,
    total,
    scale,
    window,
    table_stride,
    place_stride,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    MEMBERS: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    DIM: tl.constexpr,
    DIM_2: tl.constexpr,
    WIDTH: tl.constexpr,
    REST_2: tl.constexpr,
    SHARED: tl.constexpr,
    SPLITS: tl.constexpr,
    SINKS: tl.constexpr,
):
    """Attend from MEMBERS of the heads that read a KV head's keys, whose first DIM channels may be the values."""
    row, kv_head, split = tl.program_id(0).to(tl.int64), tl.program_id(1) // TILES, tl.program_id(2)
    length = tl.load(positions + row * place_stride).to(tl.int32) + 1
    table = tables + tl.load(slots + row * place_stride) * table_stride
    oldest = tl.maximum(length - window, 0)
    before = oldest // TILE * TILE  # whole tiles that are out of sight
    tokens = tl.cdiv(tl.cdiv(length - before, TILE), SPLITS) * TILE
    first, last = before + split * tokens, tl.minimum(before + (split + 1) * tokens, length)
    member = tl.program_id(1) % TILES * MEMBERS + tl.arange(0, MEMBERS)
    column, step, rest = tl.arange(0, DIM_2), tl.arange(0, TILE), DIM + tl.arange(0, REST_2)
    there, head = member < GROUP, (row * KV_HEADS + kv_head) * GROUP + member
    inside = there[:, None] & (column < DIM)[None, :]
    queries = tl.load(q + head[:, None] * WIDTH + column[None, :], mask=inside, other=0.0)
    others = _others(q, queries, head, there, rest, DIM, WIDTH)
    top, weight = _begin(sinks + kv_head * GROUP + member, there, split, SINKS, MEMBERS)
    sums = tl.zeros([MEMBERS, DIM_2], tl.float32)
    for start in range(first, last, TILE):
        token = start + step
        seen = (token < last) & (token >= oldest)
        block = tl.load(table + token // BLOCK_SIZE, mask=seen, other=0).to(tl.int64)
        place = ((block * KV_HEADS + kv_head) * BLOCK_SIZE + token % BLOCK_SIZE) * WIDTH
        at, mine = place[:, None] + column[None, :], seen[:, None] & (column < DIM)[None, :]
        key = tl.load(keys + at, mask=mine, other=0.0)
        score = _score(queries, others, key, keys + place, rest, seen, DIM, WIDTH)
        score = tl.where(seen[None, :], score * scale, -float("inf"))
        value = key if SHARED else tl.load(values + at, mask=mine, other=0.0)
        top, weight, sums = _add(score, value, top, weight, sums)
    _store(out, part, largest, total, head, split, column, inside, there, sums, top, weight, DIM, SPLITS)


@triton.jit
def _store(
    out,
    part,
    largest,
    total,
    head,
    split,
    column,
    inside,
    there,
    sums,
    top,
    weight,
    DIM: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Store the outputs of heads, or of a part of each what `_combine` needs."""
    if SPLITS == 1:
        result = (sums / weight[:, None]).to(out.dtype.element_ty)
        tl.store(out + head[:, None] * DIM + column[None, :], result, mask=inside)
    else:
        at = head * SPLITS + split
        tl.store(part + at[:, None] * DIM + column[None, :], sums, mask=inside)
        tl.store(largest + at, top, mask=there)
        tl.store(total + at, weight, mask=there)


@triton.jit
def _others(q, queries, head, there, rest, DIM: tl.constexpr, WIDTH: tl.constexpr):
    """Read the query channels behind the first DIM; returns `queries` where there are none."""
    if DIM < WIDTH:
        inside = there[:, None] & (rest < WIDTH)[None, :]
        queries = tl.load(q + head[:, None] * WIDTH + rest[None, :], mask=inside, other=0.0)
    return queries


@triton.jit
def _score(queries, others, key, at, rest, seen, DIM: tl.constexpr, WIDTH: tl.constexpr):
    """Multiply queries and keys: their first DIM channels, which are there, and the others."""
    score = tl.dot(queries, tl.trans(key), input_precision="ieee")
    if DIM < WIDTH:
        key = tl.load(at[:, None] + rest[None, :], mask=seen[:, None] & (rest < WIDTH)[None, :], other=0.0)
        score += tl.dot(others, tl.trans(key), input_precision="ieee")
    return score


@triton.jit
def _begin(sinks, inside, split, SINKS: tl.constexpr, MEMBERS: tl.constexpr):
    """Begin a softmax: its largest logit and its sum of weights. A sink is a logit that the first part begins with."""
    top = tl.full([MEMBERS], -float("inf"), tl.float32)
    weight = tl.zeros([MEMBERS], tl.float32)
    if SINKS:
        sink = tl.load(sinks, mask=inside, other=0.0).to(tl.float32) * LOG2_E
        top = tl.where(split == 0, sink, top)
        weight = tl.where(split == 0, weight + 1.0, weight)
    return top, weight


@triton.jit
def _add(score, value, top, weight, sums):
    """Add a tile's tokens to a softmax: to its largest logit, its sum of weights and its sum of weighted values."""
    higher = tl.maximum(top, tl.max(score, axis=1))
    shrink = tl.exp2(top - higher)
    p = tl.exp2(score - higher[:, None])
    sums = sums * shrink[:, None] + tl.dot(p.to(value.dtype), value, input_precision="ieee")
    return higher, weight * shrink + tl.sum(p, axis=1), sums


@triton.jit
def _combine(
    part,
    largest,
    total,
    out,
    DIM: tl.constexpr,
    DIM_2: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLITS_2: tl.constexpr,
):
    head = tl.program_id(0).to(tl.int64)
    split, column = tl.arange(0, SPLITS_2), tl.arange(0, DIM_2)
    at = head * SPLITS + split
    # A part without tokens has weight 0 and -inf for its largest score; the first part always has tokens.
    top = tl.load(largest + at, mask=split < SPLITS, other=-float("inf"))
    factor = tl.exp2(top - tl.max(top, axis=0))
    weight = tl.sum(tl.load(total + at, mask=split < SPLITS, other=0.0) * factor, axis=0)
    inside = (split < SPLITS)[:, None] & (column < DIM)[None, :]
    sums = tl.load(part + at[:, None] * DIM + column[None, :], mask=inside, other=0.0)
    result = tl.sum(sums * factor[:, None], axis=0) / weight
    tl.store(out + head * DIM + column, result.to(out.dtype.element_ty), mask=column < DIM)
