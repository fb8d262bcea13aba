"""RMSNorm for models without Transformer Engine."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megarl.models.rms_norm import rms_norm


class RMSNorm(torch.nn.RMSNorm):
    """torch's RMSNorm behind Megatron-Core's constructor, marked for sequence parallelism; zero-centered in Gemma.

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
