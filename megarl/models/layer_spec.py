"""Chooses the modules of a model's layers: Transformer Engine's where it is installed, torch's otherwise."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from megarl.models.architecture import Architecture
from megarl.models.attention import core_attention_for
from megarl.models.kernels import TRITON
from megarl.models.norm import RMSNorm
from megarl.models.parameter_names import ParameterNames, transformer_engine_names

if not hasattr(moe_utils, "te_general_gemm"):
    # Megatron-Core 0.16 asks `is not None`, and forgets to define it where Transformer Engine is not installed
    moe_utils.te_general_gemm = None


@dataclass(frozen=True, kw_only=True)
class LayerSpec:
    """Describes the layers of a model, all alike, and what follows from their modules.

    Attributes:
        module: Megatron-Core's spec of a layer.
        norm: class of the norm after the last layer.
        names: of a layer's parameters.
        rotates: whether its attention rotates queries and keys itself; otherwise Megatron-Core does, fused.
        kernels: what the layers run on, for people.
    """

    module: ModuleSpec
    norm: type
    names: ParameterNames
    rotates: bool
    kernels: str

    def block(self, num_layers: int) -> TransformerBlockSubmodules:
        """Stack layers, with the norm after them."""
        return TransformerBlockSubmodules(layer_specs=[self.module] * num_layers, layer_norm=self.norm)


def torch_layers(arch: Architecture) -> LayerSpec:
    """Take Megatron-Core's local layers, with torch's norm and attention.

    Megatron-Core's own local norm refuses sequence parallelism, and its local attention packed sequences.
    """
    experts = arch.moe.num_experts if arch.moe else None
    module = get_gpt_layer_local_spec(num_experts=experts, normalization="RMSNorm", qk_layernorm=arch.qk_norm)
    parts = module.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = RMSNorm
    attention = parts.self_attention.submodules
    attention.core_attention = core_attention_for(arch)
    attention.q_layernorm = attention.k_layernorm = RMSNorm if arch.qk_norm else IdentityOp
    kernels = "torch layers"
    if torch.cuda.is_available():
        kernels += " (FlashAttention, fused norm)" + (", rotary embedding in Triton" if TRITON else "")
    return LayerSpec(module=module, norm=RMSNorm, names=ParameterNames(), rotates=True, kernels=kernels)


def transformer_engine_layers(arch: Architecture) -> LayerSpec:
    """Take Transformer Engine's layers."""
    from megatron.core.extensions.transformer_engine import TENorm

    experts = arch.moe.num_experts if arch.moe else None
    return LayerSpec(
        module=get_gpt_layer_with_transformer_engine_spec(num_experts=experts, qk_layernorm=arch.qk_norm),
        norm=TENorm,
        names=transformer_engine_names(arch),
        rotates=False,
        kernels="Transformer Engine layers (fused attention, norm + linear, rotary embedding)",
    )
