"""Small models and what the reshard's tests compare with: parameters cut straight from logical tensors."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from architectures import alike

from megarl.models.architecture import Architecture
from megarl.models.parts.experts import MixtureOfExperts
from megarl.models.placements import Placement
from megarl.models.tensors import Box
from megarl.models.weights import logical_tensors

UNWRITTEN = -7
"""Bits of every element before a reshard; no logical tensor holds them, so a guard row must still have them after."""

EXPERTS = MixtureOfExperts(num_experts=3, experts_per_token=2, norm_topk_prob=True)

INTEGERS = {torch.float32: torch.int32, torch.bfloat16: torch.int16}


def architecture(*, num_layers: int, vocab_size: int = 13, tied: bool = False, **changes: Any) -> Architecture:
    """A few thousand elements. The odd vocabulary is padded by every tensor-parallel size but one."""
    sizes = {"hidden_size": 6, "ffn_hidden_size": 8}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 4}
    return alike(
        family="test",
        num_layers=num_layers,
        vocab_size=vocab_size,
        max_position_embeddings=64,
        output="tied" if tied else "lm",
        **(sizes | heads | changes),
    )


def logical_values(arch: Architecture, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Random bits per logical tensor, NaNs and infinities among them, by name."""
    generator = torch.Generator().manual_seed(0)
    info = torch.iinfo(INTEGERS[dtype])
    out = {}
    for name, tensor in logical_tensors(arch).items():
        bits = torch.randint(info.min, info.max, tensor.shape, generator=generator, dtype=INTEGERS[dtype])
        bits[bits == UNWRITTEN] = 0
        bits.view(-1)[0] = info.min  # -0
        out[name] = bits.view(dtype)
    return out


def slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(lo, hi) for lo, hi in box)


def shapes(placements: Iterable[Placement], guard_rows: int = 0) -> dict[str, list[int]]:
    """Shape of every parameter: `[rows + guard_rows, elements per row]`, or one axis if those are 1."""
    out: dict[str, list[int]] = {}
    for p in placements:
        columns = math.prod(p.view) // (p.rows[1] - p.rows[0])
        rows = max(p.rows[1] + guard_rows, out.get(p.param, [0])[0])
        out[p.param] = [rows, columns] if columns > 1 else [rows]
    return out


def parameters(
    placements: Iterable[Placement], values: dict[str, torch.Tensor], dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """A rank's parameters holding `values`, or unwritten if there are none; each with a guard row behind."""
    placements = list(placements)
    out = {
        name: torch.full(shape, UNWRITTEN, dtype=INTEGERS[dtype]).view(dtype)
        for name, shape in shapes(placements, guard_rows=1).items()
    }
    for p in placements if values else ():
        out[p.param][slice(*p.rows)].view(p.view)[slices(p.within)] = values[p.tensor][slices(p.box)]
    return out


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.view(INTEGERS[a.dtype]), b.view(INTEGERS[b.dtype]))
