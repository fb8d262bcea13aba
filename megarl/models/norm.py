"""RMSNorm for models without Transformer Engine."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig


class RMSNorm(torch.nn.RMSNorm):
    """torch's RMSNorm behind Megatron-Core's constructor, marked for sequence parallelism.

    With sequence parallelism each rank normalises its own part of the sequence, so the weight's gradient must be
    summed over the tensor-parallel group; Megatron-Core does that for parameters with `sequence_parallel` set.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        super().__init__(hidden_size, eps, dtype=config.params_dtype, device=torch.cuda.current_device())
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
