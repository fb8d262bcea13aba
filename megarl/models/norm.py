"""Implements RMSNorm for models without Transformer Engine."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megarl.models.rms_norm import norm_over_heads, rms_norm


class RMSNorm(torch.nn.RMSNorm):
    """Gives torch's RMSNorm Megatron-Core's constructor, marked for sequence parallelism; zero-centered in Gemma.

    With sequence parallelism each rank normalises its own part of the sequence, so the weight's gradient must be
    summed over the tensor-parallel group; Megatron-Core does that for parameters with `sequence_parallel` set.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        super().__init__(hidden_size, eps, dtype=config.params_dtype, device=torch.cuda.current_device())
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self._zero_centered = config.layernorm_zero_centered_gamma

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last axis."""
        assert self.eps is not None
        return rms_norm(x, self.weight, self.eps, zero_centered=self._zero_centered)


class HeadsNorm(torch.nn.Module):
    """Applies RMSNorm over the channels of all heads together, in a module of a rank that has some of the heads.

    Every rank has the whole weight. Its gradient is that of the rank's heads, so the ranks' must be added up:
    Megatron-Core does that for parameters of modules that are named `q_layernorm` and `k_layernorm`.

    Args:
        width: channels of all heads.
        first: the rank's first channel.
        group: the tensor-parallel ranks.
    """

    def __init__(self, config: TransformerConfig, width: int, first: int, group: dist.ProcessGroup) -> None:
        super().__init__()
        device = torch.cuda.current_device()
        self.weight = torch.nn.Parameter(torch.empty(width, dtype=config.params_dtype, device=device))
        self._eps, self._first, self._group = config.layernorm_epsilon, first, group

    def forward(self, x: Tensor) -> Tensor:
        """Normalise [..., heads of the rank, width of a head]."""
        here = self.weight[self._first : self._first + x.shape[-2] * x.shape[-1]]
        return norm_over_heads(x, here, self._eps, self._mean_over_ranks)

    def _mean_over_ranks(self, square: Tensor) -> Tensor:
        total = reduce_from_tensor_model_parallel_region(square, group=self._group)
        # each rank's heads depend on it, so that its gradient is the sum of the ranks'
        return copy_to_tensor_model_parallel_region(total, group=self._group) / self._group.size()
