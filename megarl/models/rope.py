"""Computes rotary position embeddings (arXiv 2104.09864) in the half-rotated form of Hugging Face and Megatron-Core."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megarl.models.kernels import TRITON
from megarl.models.parts.rotary import Rotary, Yarn


def rope_frequencies(attention: Rotary, device: torch.device | str) -> Tensor:
    """Compute the radians per position: float32 [rotary_dim / 2], with the attention's scaling.

    Llama 3.1's rule is that of its reference code (`apply_scaling` in meta-llama/llama-models, `llama3` in
    transformers): between the two wavelengths the weight of the unscaled frequency is linear in 1 / wavelength. YaRN's
    is linear in the number of the frequency.
    """
    exponent = torch.arange(0, attention.rotary_dim, 2, dtype=torch.float32, device=device) / attention.rotary_dim
    frequencies = 1.0 / attention.rope_theta**exponent
    scaling = attention.rope_scaling
    if scaling is None:
        return frequencies
    slowed = frequencies / scaling.factor
    if isinstance(scaling, Yarn):
        first, last = scaling.stretched_channels(attention.rotary_dim, attention.rope_theta)
        pairs = torch.arange(len(frequencies), dtype=torch.float32, device=device)
        return torch.lerp(frequencies, slowed, ((pairs - first) / (last - first or 0.001)).clamp(0, 1))
    if scaling.original_max_position_embeddings is None:
        return slowed
    waves = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)  # in the pretraining's length
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    return torch.lerp(slowed, frequencies, ((waves - low) / (high - low)).clamp(0, 1))


def rope_table(attention: Rotary, length: int, device: torch.device | str) -> Tensor:
    """Tabulate cos and sin of every position, times YaRN's factor: float32 [length, 2, rotary_dim / 2]."""
    positions = torch.arange(length, dtype=torch.float32, device=device)
    angles = torch.outer(positions, rope_frequencies(attention, device))
    factor = attention.rope_scaling.rotation_factor if isinstance(attention.rope_scaling, Yarn) else 1.0
    return torch.stack((angles.cos(), angles.sin()), dim=1) * factor


def apply_rope(x: Tensor, cos_sin: Tensor) -> Tensor:
    """Rotate the first channels of queries or keys.

    Args:
        x: [tokens, heads, head_dim].
        cos_sin: [tokens, 2, rotary_dim / 2], rows of `rope_table` at the tokens' positions.
    """
    if TRITON and x.is_cuda:
        from megarl.models import rope_triton

        return rope_triton.apply_rope(x, cos_sin)
    cos, sin = cos_sin.to(x.dtype).unsqueeze(2).unbind(1)
    half = cos.shape[-1]
    a, b, rest = x.split((half, half, x.shape[-1] - 2 * half), dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), dim=-1)


def pairs_apart(x: Tensor) -> Tensor:
    """Reorder channels whose neighbours turn together, as in DeepSeek's files, for `apply_rope`: 0 2 4 ... 1 3 5 ..."""
    return x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
