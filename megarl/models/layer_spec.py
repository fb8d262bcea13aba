"""Chooses the modules of a model's layers: Transformer Engine's where it is installed, torch's otherwise."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.moe import moe_utils, token_dispatcher
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from megarl.models.architecture import Architecture, Layer
from megarl.models.attention import core_attention
from megarl.models.biased_router import BiasedRouter
from megarl.models.expert_output import ExpertOutput
from megarl.models.kernels import TRITON
from megarl.models.norm import RMSNorm
from megarl.models.output_norms import LayerWithOutputNorms
from megarl.models.parameter_names import ParameterNames
from megarl.models.parts.grouped_query import GroupedQuery
from megarl.models.parts.stacked_experts import StackedExperts
from megarl.parallel.cpu import counts_on_host

if not hasattr(moe_utils, "te_general_gemm"):
    # Megatron-Core 0.16 asks `is not None`, and forgets to define it where Transformer Engine is not installed
    moe_utils.te_general_gemm = None
if not torch.cuda.is_available():
    token_dispatcher.maybe_move_tensor_to_cpu = counts_on_host


@dataclass(frozen=True, kw_only=True)
class LayerSpec:
    """Describes the layers of a model, and what follows from their modules.

    Attributes:
        modules: Megatron-Core's spec of each kind of layer.
        norm: class of the norm after the last layer.
        names: of a layer's parameters.
        rotates: whether its attention rotates queries and keys itself; otherwise Megatron-Core does, fused.
        kernels: what the layers run on, for people.
    """

    modules: Mapping[Layer, ModuleSpec]
    norm: type
    names: ParameterNames
    rotates: bool
    kernels: str

    def block(self, layers: Sequence[Layer]) -> TransformerBlockSubmodules:
        """Stack layers, with the norm after them."""
        return TransformerBlockSubmodules(layer_specs=[self.modules[kind] for kind in layers], layer_norm=self.norm)


def torch_layers(arch: Architecture) -> LayerSpec:
    """Take Megatron-Core's local layers, with torch's norm and attention.

    Megatron-Core's own local norm refuses sequence parallelism, and its local attention packed sequences.
    """
    kernels = "torch layers"
    if torch.cuda.is_available():
        kernels += " (FlashAttention, fused norm)" + (", rotary embedding in Triton" if TRITON else "")
    modules = {kind: _torch_layer(kind) for kind in arch.kinds}
    return LayerSpec(modules=modules, norm=RMSNorm, names=ParameterNames(), rotates=True, kernels=kernels)


def _torch_layer(kind: Layer) -> ModuleSpec:
    module = get_gpt_layer_local_spec(normalization="RMSNorm", **_spec_arguments(kind))
    parts = module.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = RMSNorm if kind.input_norms else IdentityOp
    # a checkpoint has norms by Transformer Engine's names, which fuses them with some parts; Megatron-Core's map does
    # so for experts and latent attention, too
    stored = {"input_layernorm.weight": kind.attention.fused_norm, "pre_mlp_layernorm.weight": kind.mlp.fused_norm}
    parts.sharded_state_dict_keys_map = {name: fused for name, fused in stored.items() if fused}
    if isinstance(kind.mlp, StackedExperts):
        mixture = _submodules(parts.mlp)
        mixture.router = BiasedRouter
        _submodules(mixture.experts).linear_fc2 = ExpertOutput
    if kind.output_norms:
        module.module = LayerWithOutputNorms
    import_module(kind.attention.training_module).set_modules(parts.self_attention, kind.attention)
    return module


def _submodules(spec: Any) -> Any:
    """Find the submodules that a spec names; Megatron-Core 0.19 has partial functions for some specs."""
    return spec.submodules if hasattr(spec, "submodules") else spec.keywords["submodules"]


def transformer_engine_layers(arch: Architecture, *, own_attention: bool = False) -> LayerSpec:
    """Take Transformer Engine's layers.

    Args:
        own_attention: queries and keys are rotated, and attend, as in `torch_layers`: Transformer Engine's kernels take
            neither a part of the tokens nor sequences that have some in common, nor YaRN.
    """
    from megatron.core.extensions.transformer_engine import TENorm

    from megarl.models.fused_swiglu import FusedSwiGLU

    # one kernel for the products of all experts, in place of one for each: a host launches so many too slowly
    os.environ.setdefault("NVTE_USE_CUTLASS_GROUPED_GEMM", "1")
    modules = {}
    for kind in arch.kinds:
        module = get_gpt_layer_with_transformer_engine_spec(moe_grouped_gemm=True, **_spec_arguments(kind))
        if own_attention:
            assert isinstance(kind.attention, GroupedQuery), "no other attention is Transformer Engine's"
            parts = _submodules(module.submodules.self_attention)
            parts.core_attention = core_attention(kind.attention)
            if kind.attention.norm_over_heads:  # which is a part of the core attention
                parts.q_layernorm = parts.k_layernorm = IdentityOp
        if kind.megatron_fields().get("num_moe_experts"):
            _use_grouped_experts(_submodules(module.submodules.mlp))
        else:
            _submodules(module.submodules.mlp).activation_func = FusedSwiGLU
        modules[kind] = module
    attention = "torch's attention" if own_attention else "fused attention, rotary embedding"
    grouped = ", grouped GEMM of experts" if arch.moe else ""
    return LayerSpec(
        modules=modules,
        norm=TENorm,
        names=ParameterNames(fused_norms=True, grouped_experts=True),
        rotates=own_attention,
        kernels=f"Transformer Engine layers (norm + linear, {attention}{grouped})",
    )


def _use_grouped_experts(mixture: Any) -> None:
    """Replace the class of a mixture's experts in Megatron-Core's spec."""
    from megarl.models.grouped_experts import GroupedExperts

    if isinstance(mixture.experts, ModuleSpec):
        mixture.experts.module = GroupedExperts
    else:  # Megatron-Core 0.19
        mixture.experts = partial(GroupedExperts, **mixture.experts.keywords)


def _spec_arguments(kind: Layer) -> dict[str, Any]:
    fields = kind.megatron_fields()
    return dict(
        num_experts=fields.get("num_moe_experts"),
        qk_layernorm=fields.get("qk_layernorm", False),
        multi_latent_attention=fields.get("multi_latent_attention", False),
    )
