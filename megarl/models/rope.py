"""Rotary position embedding (arXiv 2104.09864) in the half-rotated form of Hugging Face and Megatron-Core."""

from __future__ import annotations

import torch
from torch import Tensor

from megarl.models.architecture import Architecture


def rope_table(arch: Architecture, length: int, device: torch.device | str) -> Tensor:
    """cos and sin of every position: float32 [length, 2, head_dim / 2]."""
    exponent = torch.arange(0, arch.head_dim, 2, dtype=torch.float32, device=device) / arch.head_dim
    angles = torch.outer(torch.arange(length, dtype=torch.float32, device=device), arch.rope_theta**-exponent)
    return torch.stack((angles.cos(), angles.sin()), dim=1)


def apply_rope(x: Tensor, cos_sin: Tensor) -> Tensor:
    """Rotate queries or keys.

    Args:
        x: [tokens, heads, head_dim].
        cos_sin: [tokens, 2, head_dim / 2], rows of `rope_table` at the tokens' positions.
    """
    cos, sin = cos_sin.to(x.dtype).unsqueeze(2).unbind(1)
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
