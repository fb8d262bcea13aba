"""Draws tokens as `megarl.rollout.native.sampler` does without filters, reading the logits once.

It inverts the cumulated distribution in two steps: the weight of every chunk of the vocabulary, then, in the chunk
where the random number falls, the token. Probabilities are added up in float64.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

CHUNK = 4096
"""Tokens of the vocabulary that one program adds up."""


def draw(logits: Tensor, *, temperature: float, seeds: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Draw a token per row.

    Args:
        logits: [B, V], of any float dtype; the last axis dense.
        seeds, positions: int64 [B], from which the random numbers follow as in `sampler.uniform`.

    Returns:
        token ids, int64 [B]; their log-probabilities at `temperature`, float32 [B], nats.
    """
    rows, vocab = logits.shape
    assert logits.stride(1) == 1 and seeds.stride() == positions.stride()
    chunks = triton.cdiv(vocab, CHUNK)
    largest = torch.empty(rows, chunks, dtype=torch.float32, device=logits.device)
    weights = torch.empty(rows, chunks, dtype=torch.float64, device=logits.device)
    _weigh_chunks[(rows, chunks)](
        logits, largest, weights, 1 / temperature, vocab, chunks, logits.stride(0), CHUNK=CHUNK
    )
    token_ids = torch.empty(rows, dtype=torch.int64, device=logits.device)
    logp = torch.empty(rows, dtype=torch.float32, device=logits.device)
    _draw[(rows,)](
        logits,
        largest,
        weights,
        seeds,
        positions,
        token_ids,
        logp,
        1 / temperature,
        vocab,
        chunks,
        logits.stride(0),
        seeds.stride(0),
        CHUNK=CHUNK,
        CHUNKS_2=triton.next_power_of_2(chunks),
        num_warps=8,
    )
    return token_ids, logp


@triton.jit
def _weigh_chunks(logits, largest, weights, sharpness, vocab, chunks, row_stride, CHUNK: tl.constexpr):
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits + row * row_stride + token, mask=token < vocab, other=-float("inf")).to(tl.float32)
    top = tl.max(x, axis=0)
    # Subtracting -inf from -inf would make a chunk of impossible tokens NaN.
    x -= tl.where(top == -float("inf"), 0.0, top)
    at = row * chunks + chunk
    tl.store(largest + at, top)
    tl.store(weights + at, tl.sum(tl.exp(x * sharpness).to(tl.float64), axis=0))


@triton.jit
def _draw(
    logits,
    largest,
    weights,
    seeds,
    positions,
    token_ids,
    logp,
    sharpness,
    vocab,
    chunks,
    row_stride,
    place_stride,
    CHUNK: tl.constexpr,
    CHUNKS_2: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    number = _uniform(tl.load(seeds + row * place_stride), tl.load(positions + row * place_stride))

    chunk = tl.arange(0, CHUNKS_2)
    at = row * chunks + chunk
    tops = tl.load(largest + at, mask=chunk < chunks, other=-float("inf"))
    top = tl.max(tops, axis=0)
    weight = tl.load(weights + at, mask=chunk < chunks, other=0.0)
    weight *= tl.exp((tops - top) * sharpness).to(tl.float64)
    total = tl.sum(weight, axis=0)
    number *= total
    chosen = _first_beyond(weight, number, chunk, CHUNKS_2)
    before = tl.sum(tl.where(chunk < chosen, weight, 0.0), axis=0)

    # The weights that were added up in this chunk, and what is left of the random number on their scale.
    chunk_top = tl.load(largest + row * chunks + chosen)
    number = (number - before) / tl.exp((chunk_top - top) * sharpness).to(tl.float64)
    column = tl.arange(0, CHUNK)
    token = chosen * CHUNK + column
    x = tl.load(logits + row * row_stride + token, mask=token < vocab, other=-float("inf")).to(tl.float32)
    weight = tl.exp((x - chunk_top) * sharpness).to(tl.float64)
    drawn = chosen * CHUNK + _first_beyond(weight, number, column, CHUNK)

    x = tl.load(logits + row * row_stride + drawn).to(tl.float32) - top
    tl.store(token_ids + row, drawn.to(tl.int64))
    tl.store(logp + row, (x * sharpness - tl.log(total)).to(tl.float32))


@triton.jit
def _first_beyond(weight, number, index, SIZE: tl.constexpr):
    """Find the first index at which the cumulated weight exceeds the number, never an index without weight.

    A parallel cumulated sum may round so that it never does: then this is the last index with weight. NaN weights: 0.
    """
    beyond = (tl.cumsum(weight, axis=0) > number) & (weight > 0)
    first = tl.min(tl.where(beyond, index, SIZE), axis=0)
    last = tl.max(tl.where(weight > 0, index, 0), axis=0)
    return tl.where(first < SIZE, first, last)


@triton.jit
def _uniform(seed, position):
    """Compute `sampler.uniform`: splitmix64, float64 in [0, 1)."""
    seed, position = seed.to(tl.uint64, bitcast=True), position.to(tl.uint64, bitcast=True)
    bits = _mix(_mix(seed) + position * 0x9E3779B97F4A7C15)
    return (bits >> 12).to(tl.float64) * 2.220446049250313e-16


@triton.jit
def _mix(x):
    x += 0x9E3779B97F4A7C15
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)
