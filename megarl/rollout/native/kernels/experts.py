"""Sends tokens through a mixture's experts, which are gated MLPs, as the fused kernels of vLLM and SGLang do.

A pair is a token with one of its experts. Pairs are sorted by expert, and each expert's are filled up to whole blocks
of rows, so that a program multiplies the rows of a block by the matrices of one expert: 5 pairs of expert 0 and 20 of
expert 2 make blocks of 16 rows for 0, 2 and 2. The host reads nothing back, so that a CUDA graph can capture it: memory
and programs are those of the most blocks that so many pairs can make, and the programs of blocks that are not there end
at once. Sums are always in the same order.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

CHUNK = 1024
"""Pairs, or columns of the result, that a program looks at together."""

_for_any_count = triton.jit(do_not_specialize=["pairs"])
"""Compiles a kernel once for all numbers of pairs; Triton would do so anew for 1 and for multiples of 16."""


class ClampedGLU(NamedTuple):
    """Makes experts those of gpt-oss: down(gate sigmoid(1.702 gate) (up + 1)), each projection with a bias.

    Attributes:
        gate_up, down: biases [experts, 2 ffn] and [experts, hidden].
        limit: the gate is clamped from above, and up from both sides.
        share: by which `down` is multiplied, since all ranks that share an expert add it.
    """

    gate_up: Tensor
    down: Tensor
    limit: float
    share: float


def mixture(
    x: Tensor,
    weights: Tensor,
    chosen: Tensor,
    gate_up: Tensor,
    down: Tensor,
    *,
    first: int,
    num_experts: int,
    clamped: ClampedGLU | None = None,
) -> Tensor:
    """Compute the weighted sum of what some experts make of each token; other experts count for nothing.

    Matrix products add up in float32. Each result is rounded to the dtype of `x` where it would be if experts were
    computed one after another; the sum over a token's experts is in float32.

    Args:
        x: [T, hidden], dense, as all tensors here.
        weights, chosen: of each token's experts, float32, and their numbers, int64; both [T, experts_per_token].
        gate_up, down: [experts, 2 ffn, hidden] and [experts, hidden, ffn] of experts `first`, `first` + 1, ...
        num_experts: among which tokens choose.
        clamped: None makes experts down(silu(gate) up).

    Returns: [T, hidden].
    """
    assert all(tensor.is_contiguous() for tensor in (x, weights, chosen, gate_up, down))
    (tokens, each), hidden, ffn = chosen.shape, x.shape[1], down.shape[2]
    pairs = tokens * each
    rows = _block_rows(pairs, num_experts)
    order, expert_of = _sort(chosen, first, len(gate_up), rows)
    activated, computed = x.new_empty(pairs, ffn), x.new_empty(pairs, hidden)
    own = clamped or ClampedGLU(gate_up, down, limit=0.0, share=0.0)  # whose tensors nothing reads
    sizes = dict(ROWS=rows, DEPTH=64 if x.itemsize == 2 else 32, num_warps=8 if rows > 64 else 4, num_stages=3)
    sizes |= dict(CLAMPED=clamped is not None)
    _gate_and_up[(triton.cdiv(ffn, 64), len(expert_of))](
        x,
        order,
        expert_of,
        gate_up,
        own.gate_up,
        activated,
        own.limit,
        pairs,
        hidden,
        ffn,
        EACH=each,
        COLUMNS=64,
        **sizes,
    )
    columns = 128 if rows > 64 else 64
    _down[(triton.cdiv(hidden, columns), len(expert_of))](
        activated, order, expert_of, down, own.down, computed, own.share, pairs, hidden, ffn, COLUMNS=columns, **sizes
    )
    out = torch.empty_like(x)
    _add_up[(tokens, triton.cdiv(hidden, CHUNK))](
        computed, weights, chosen, out, first, len(gate_up), hidden, EACH=each, COLUMNS=CHUNK
    )
    return out


def _block_rows(pairs: int, experts: int) -> int:
    """Choose the rows of a block: about as many as an expert has pairs, between 16, the least of a product, and 128."""
    return min(max(triton.next_power_of_2(triton.cdiv(pairs, experts)), 16), 128)


def _sort(chosen: Tensor, first: int, experts: int, rows: int) -> tuple[Tensor, Tensor]:
    """Sort pairs by expert, in blocks.

    Returns: the pair of each row, int32 [blocks * rows], or the number of pairs where a block is filled up; and each
    block's expert, int32 [blocks], counted from `first`, or -1 for blocks that are not there.
    """
    pairs, device = chosen.numel(), chosen.device
    blocks = triton.cdiv(pairs + min(experts, pairs) * (rows - 1), rows)
    counts = torch.empty(experts, dtype=torch.int32, device=device)
    order = torch.empty(blocks * rows, dtype=torch.int32, device=device)
    expert_of = torch.empty(blocks, dtype=torch.int32, device=device)
    _count[(experts,)](chosen, counts, first, pairs, CHUNK=CHUNK)
    _place[(experts + 1,)](
        chosen,
        counts,
        order,
        expert_of,
        first,
        pairs,
        experts,
        blocks,
        ROWS=rows,
        EXPERTS_2=triton.next_power_of_2(experts),
        CHUNK=CHUNK,
    )
    return order, expert_of


@_for_any_count
def _count(chosen, counts, first, pairs, CHUNK: tl.constexpr):
    """Count the pairs of an expert."""
    expert = tl.program_id(0)
    count = tl.zeros([CHUNK], tl.int32)
    for start in range(0, pairs, CHUNK):
        pair = start + tl.arange(0, CHUNK)
        count += (tl.load(chosen + pair, mask=pair < pairs, other=-1) == first + expert).to(tl.int32)
    tl.store(counts + expert, tl.sum(count, axis=0))


@_for_any_count
def _place(
    chosen,
    counts,
    order,
    expert_of,
    first,
    pairs,
    experts,
    blocks,
    ROWS: tl.constexpr,
    EXPERTS_2: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Write the blocks of an expert; the program after the last expert's writes those that are not there."""
    expert, step = tl.program_id(0), tl.arange(0, CHUNK)
    number = tl.arange(0, EXPERTS_2)
    of_each = (tl.load(counts + number, mask=number < experts, other=0) + ROWS - 1) // ROWS
    begin = tl.sum(tl.where(number < expert, of_each, 0), axis=0)
    end = begin + tl.sum(tl.where(number == expert, of_each, 0), axis=0)
    last = tl.where(expert == experts, blocks, end)
    name = tl.where(expert == experts, -1, expert)
    for start in range(begin, last, CHUNK):
        tl.store(expert_of + start + step, name, mask=start + step < last)
    row = begin * ROWS
    for start in range(0, pairs, CHUNK):
        pair = start + step
        mine = (tl.load(chosen + pair, mask=pair < pairs, other=-1) == first + expert) & (expert < experts)
        one = mine.to(tl.int32)
        tl.store(order + row + tl.cumsum(one, axis=0) - 1, pair, mask=mine)
        row += tl.sum(one, axis=0)
    filling = row + tl.arange(0, ROWS)
    tl.store(order + filling, pairs, mask=filling < end * ROWS)


@_for_any_count
def _gate_and_up(
    x,
    order,
    expert_of,
    gate_up,
    biases,
    out,
    limit,
    pairs,
    hidden,
    ffn,
    EACH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    CLAMPED: tl.constexpr,
):
    """Compute silu(gate) * up of a block's pairs, or what `ClampedGLU` says, some columns of it."""
    block = tl.program_id(1)
    expert = tl.load(expert_of + block).to(tl.int64)
    if expert < 0:
        return
    pair = tl.load(order + block * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    there = (pair < pairs)[:, None]
    column = (tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    token, matrix = (pair // EACH)[:, None], gate_up + expert * 2 * ffn * hidden
    gate, up = tl.zeros([ROWS, COLUMNS], tl.float32), tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, hidden, DEPTH):
        depth = start + tl.arange(0, DEPTH)
        at, inside = column * hidden + depth[:, None], (column < ffn) & (depth < hidden)[:, None]
        part = tl.load(x + token * hidden + depth[None, :], mask=there & (depth < hidden)[None, :], other=0.0)
        gate += tl.dot(part, tl.load(matrix + at, mask=inside, other=0.0), input_precision="ieee")
        up += tl.dot(part, tl.load(matrix + ffn * hidden + at, mask=inside, other=0.0), input_precision="ieee")
    kind = out.dtype.element_ty
    if CLAMPED:
        bias = biases + expert * 2 * ffn + column
        gate += tl.load(bias, mask=column < ffn, other=0.0).to(tl.float32)
        up += tl.load(bias + ffn, mask=column < ffn, other=0.0).to(tl.float32)
    gate, up = gate.to(kind).to(tl.float32), up.to(kind).to(tl.float32)
    if CLAMPED:
        gate, up = tl.minimum(gate, limit), tl.clamp(up, -limit, limit)
        slope = (1.702 * gate).to(kind).to(tl.float32)
        up = (up + 1.0).to(kind).to(tl.float32)
    else:
        slope = gate
    activated = (gate / (1.0 + tl.exp(-slope))).to(kind).to(tl.float32)
    tl.store(out + pair[:, None] * ffn + column, (activated * up).to(kind), mask=there & (column < ffn))


@_for_any_count
def _down(
    activated,
    order,
    expert_of,
    down,
    biases,
    out,
    share,
    pairs,
    hidden,
    ffn,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    CLAMPED: tl.constexpr,
):
    """Compute the last product of a block's pairs, some columns of it."""
    block = tl.program_id(1)
    expert = tl.load(expert_of + block).to(tl.int64)
    if expert < 0:
        return
    pair = tl.load(order + block * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    there = pair < pairs
    column = (tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    matrix = down + expert * hidden * ffn
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, ffn, DEPTH):
        depth = start + tl.arange(0, DEPTH)
        at, inside = column * ffn + depth[:, None], (column < hidden) & (depth < ffn)[:, None]
        part = tl.load(activated + pair * ffn + depth[None, :], mask=there & (depth < ffn)[None, :], other=0.0)
        total += tl.dot(part, tl.load(matrix + at, mask=inside, other=0.0), input_precision="ieee")
    if CLAMPED:
        total += share * tl.load(biases + expert * hidden + column, mask=column < hidden, other=0.0).to(tl.float32)
    tl.store(out + pair * hidden + column, total.to(out.dtype.element_ty), mask=there & (column < hidden))


@triton.jit
def _add_up(computed, weights, chosen, out, first, experts, hidden, EACH: tl.constexpr, COLUMNS: tl.constexpr):
    """Add up what a token's experts computed, weighted; nothing was written of pairs of other experts."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros([COLUMNS], tl.float32)
    for i in range(EACH):
        pair = token * EACH + i
        expert = tl.load(chosen + pair) - first
        mine = (expert >= 0) & (expert < experts)
        part = tl.load(computed + pair * hidden + column, mask=mine & (column < hidden), other=0.0).to(tl.float32)
        total += part * tl.load(weights + pair)
    tl.store(out + token * hidden + column, total.to(out.dtype.element_ty), mask=column < hidden)
