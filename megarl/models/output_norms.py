"""Builds the layer whose attention and MLP have norms on what they compute, too."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from megarl.models.norm import RMSNorm

Add = Callable[[tuple[Tensor, Tensor | None], Tensor, float], Tensor]
"""Megatron-Core's "bias, dropout, add": (what a part computed, its bias), residual, dropout -> their sum."""

Choose = Callable[[bool, bool], Add]
"""Of Megatron-Core's sums, the one while it trains or not, fused or not."""


class LayerWithOutputNorms(TransformerLayer):
    """Is Megatron-Core's layer, which normalises before it adds to the residual stream."""

    def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self.post_attention_layernorm = RMSNorm(config, config.hidden_size, config.layernorm_epsilon)
        self.post_mlp_layernorm = RMSNorm(config, config.hidden_size, config.layernorm_epsilon)
        self.self_attn_bda: Choose = partial(_norm_and_add, self.self_attn_bda, self.post_attention_layernorm)
        self.mlp_bda: Choose = partial(_norm_and_add, self.mlp_bda, self.post_mlp_layernorm)


def _norm_and_add(choose: Choose, norm: RMSNorm, training: bool, fused: bool) -> Add:
    """Put a norm before the sum that Megatron-Core chooses."""
    add = choose(training, fused)

    def normed(output: tuple[Tensor, Tensor | None], residual: Tensor, dropout: float) -> Tensor:
        computed, bias = output
        return add((norm(computed if bias is None else computed + bias), None), residual, dropout)

    return normed
