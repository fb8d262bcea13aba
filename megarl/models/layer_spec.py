"""Which modules a transformer layer is made of: Transformer Engine's where it is installed, torch's otherwise."""

from __future__ import annotations

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
from megarl.models.norm import RMSNorm

if not hasattr(moe_utils, "te_general_gemm"):
    # Megatron-Core 0.16 asks `is not None`, and forgets to define it where Transformer Engine is not installed
    moe_utils.te_general_gemm = None


def block_spec(arch: Architecture, num_layers: int, *, transformer_engine: bool) -> TransformerBlockSubmodules:
    """The modules of a stack of `num_layers` equal layers and the norm after it."""
    experts = arch.moe.num_experts if arch.moe else None
    if transformer_engine:
        from megatron.core.extensions.transformer_engine import TENorm

        layer = get_gpt_layer_with_transformer_engine_spec(num_experts=experts, qk_layernorm=arch.qk_norm)
        return TransformerBlockSubmodules(layer_specs=[layer] * num_layers, layer_norm=TENorm)
    layer = get_gpt_layer_local_spec(num_experts=experts, normalization="RMSNorm", qk_layernorm=arch.qk_norm)
    _use_torch_modules(layer, arch)
    return TransformerBlockSubmodules(layer_specs=[layer] * num_layers, layer_norm=RMSNorm)


def _use_torch_modules(layer: ModuleSpec, arch: Architecture) -> None:
    """Megatron-Core's own local norm refuses sequence parallelism, and its local attention packed sequences."""
    modules = layer.submodules
    modules.input_layernorm = modules.pre_mlp_layernorm = RMSNorm
    attention = modules.self_attention.submodules
    attention.core_attention = core_attention_for(arch)
    attention.q_layernorm = attention.k_layernorm = RMSNorm if arch.qk_norm else IdentityOp
