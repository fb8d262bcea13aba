"""Computes rotary position embeddings (arXiv 2104.09864) in the half-rotated form of Hugging Face and Megatron-Core."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megarl.models.kernels import TRITON
from megarl.models.parts.grouped_query import GroupedQuery, Yarn


def rope_frequencies(attention: GroupedQuery, device: torch.device | str) -> Tensor:
    """Compute the radians per position: float32 [rotary_dim / 2], with the attention's scaling.

    Llama 3.1's rule is that of its reference code (`apply_scaling` in meta-llama/llama-models, `llama3` in
    transformers): between the two wavelengths the weight of the unscaled frequency is linear in 1 / wavelength.
    """
    exponent = torch.arange(0, attention.rotary_dim, 2, dtype=torch.float32, device=device) / attention.rotary_dim
    frequencies = 1.0 / attention.rope_theta**exponent
    scaling = attention.rope_scaling
    if scaling is None:
        return frequencies
    if isinstance(scaling, Yarn):
        return _yarn_frequencies(attention, scaling, frequencies)
    slowed = frequencies / scaling.factor
    if scaling.original_max_position_embeddings is None:
        return slowed
    waves = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)  # in the pretraining's length
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    return torch.lerp(slowed, frequencies, ((waves - low) / (high - low)).clamp(0, 1))


def _yarn_frequencies(attention: GroupedQuery, yarn: Yarn, frequencies: Tensor) -> Tensor:
    """Slow down what turns seldom within the pretraining's length (arXiv 2309.00071, section 3.2)."""

    def channel(turns: float) -> float:
        """Find the place, between frequencies, of the one that turns so often."""
        wave = yarn.original_max_position_embeddings / (turns * 2 * math.pi)
        return attention.rotary_dim * math.log(wave) / (2 * math.log(attention.rope_theta))

    low, high = channel(yarn.beta_fast), channel(yarn.beta_slow)
    if yarn.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, attention.rotary_dim - 1)
    places = torch.arange(len(frequencies), dtype=torch.float32, device=frequencies.device)
    part = ((places - low) / (high - low if high != low else 0.001)).clamp(0, 1)
    return torch.lerp(frequencies, frequencies / yarn.factor, part)


def rope_table(attention: GroupedQuery, length: int, device: torch.device | str) -> Tensor:
    """Tabulate cos and sin of every position, times YaRN's factor: float32 [length, 2, rotary_dim / 2]."""
    positions = torch.arange(length, dtype=torch.float32, device=device)
    angles = torch.outer(positions, rope_frequencies(attention, device))
    scaling = attention.rope_scaling
    factor = scaling.attention_factor if isinstance(scaling, Yarn) else 1.0
    return factor * torch.stack((angles.cos(), angles.sin()), dim=1)


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
