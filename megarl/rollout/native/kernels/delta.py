"""Advances the states of gated delta nets by a token, where they lie: each is read once and written once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megarl.models.delta_rule import Heads

NUMBERS = 8192
"""A program holds so many numbers of a state."""


def delta_step(heads: Heads, states: Tensor, slots: Tensor) -> Tensor:
    """Compute what `megarl.models.delta_rule.delta_step` does, of one token of each sequence.

    Args:
        states: float32 [slots, n, r, key_dim, value_dim], dense; those in `slots` are changed.
        slots: int64 [T], of the tokens' sequences.

    Returns: [T, n, r, value_dim] in the type of the values.
    """
    _, n, per_key, key_dim, value_dim = states.shape
    inputs = (heads.query, heads.key, heads.value, heads.decay, heads.strength)
    query, key, value, decay, strength = (x.contiguous() for x in inputs)
    assert states.is_contiguous() and states.dtype == query.dtype == decay.dtype == torch.float32
    key_2 = triton.next_power_of_2(key_dim)
    columns = min(triton.next_power_of_2(value_dim), max(NUMBERS // key_2, 1))
    out = torch.empty_like(value)
    _delta_step[(len(slots), n * per_key, triton.cdiv(value_dim, columns))](
        query,
        key,
        value,
        decay,
        strength,
        slots,
        states,
        out,
        slots.stride(0),
        HEADS=n * per_key,
        PER_KEY=per_key,
        KEY_DIM=key_dim,
        KEY_2=key_2,
        VALUE_DIM=value_dim,
        COLUMNS=columns,
        num_warps=4,
    )
    return out


@triton.jit
def _delta_step(
    query,
    key,
    value,
    decay,
    strength,
    slots,
    states,
    out,
    slot_stride,
    HEADS: tl.constexpr,
    PER_KEY: tl.constexpr,
    KEY_DIM: tl.constexpr,
    KEY_2: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Change some columns of a head's state, which do not depend on the others."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots + row * slot_stride)
    line, column = tl.arange(0, KEY_2), tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    there, inside = line < KEY_DIM, column < VALUE_DIM
    both = there[:, None] & inside[None, :]
    of_key = (row * (HEADS // PER_KEY) + head // PER_KEY) * KEY_DIM + line
    of_head = row * HEADS + head
    at = states + ((slot * HEADS + head) * KEY_DIM + line[:, None]) * VALUE_DIM + column[None, :]
    k = tl.load(key + of_key, mask=there, other=0.0)[:, None]
    q = tl.load(query + of_key, mask=there, other=0.0)[:, None]
    v = tl.load(value + of_head * VALUE_DIM + column, mask=inside, other=0.0).to(tl.float32)
    state = tl.load(at, mask=both, other=0.0) * tl.exp(tl.load(decay + of_head))
    correction = tl.load(strength + of_head) * (v - tl.sum(state * k, axis=0))
    state += k * correction[None, :]
    tl.store(at, state, mask=both)
    tl.store(out + of_head * VALUE_DIM + column, tl.sum(state * q, axis=0).to(out.dtype.element_ty), mask=inside)
