"""Names what the training layout's model calls one way or another, as its kernels want. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from megarl.models.architecture import Layer


@dataclass(frozen=True, kw_only=True)
class ParameterNames:
    """Names the norms of a transformer layer, after the layer's prefix; the parts of a layer name the rest.

    Attributes:
        fused_norms: whether a norm lies in the linear layer after it, where there is one, as in Transformer Engine's
            layers; otherwise it is a module of its own.
        grouped_experts: see `LayerPlace`.
    """

    fused_norms: bool = False
    grouped_experts: bool = False

    output_norms: ClassVar = ("post_attention_layernorm.weight", "post_mlp_layernorm.weight")

    def input_norm(self, layer: Layer) -> str:
        """Name the norm before attention."""
        return (self.fused_norms and layer.attention.fused_norm) or "input_layernorm.weight"

    def mlp_norm(self, layer: Layer) -> str:
        """Name the norm before the MLP."""
        return (self.fused_norms and layer.mlp.fused_norm) or "pre_mlp_layernorm.weight"
