"""Describes Qwen3-Next: three layers of gated delta nets, then one gated attention; experts, and a shared gated one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megarl.models.architecture import Architecture
from megarl.models.families import llama
from megarl.models.families.fields import FULL, LINEAR, alternating, check_only
from megarl.models.parts.experts import Experts, MixtureOfExperts
from megarl.models.parts.gated_delta import GatedDelta
from megarl.models.parts.part import MLPPart

_DEFAULTS: dict[str, Any] = {
    "decoder_sparse_step": 1,
    "full_attention_interval": 4,
    "head_dim": 256,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "norm_topk_prob": True,
    "partial_rotary_factor": 0.25,
}


def architecture(config: dict[str, Any]) -> Architecture:
    """Read a Hugging Face `Qwen3NextConfig`; raises KeyError for a missing field, ValueError for an unsupported one."""
    return with_experts(config, "qwen3_next", joined=True)


def with_experts(config: dict[str, Any], family: str, *, joined: bool) -> Architecture:
    """Read a model with experts in every layer.

    Args:
        joined: as of `GatedDelta`.
    """
    config = _DEFAULTS | config
    check_only(config, family, {"decoder_sparse_step": 1, "mlp_only_layers": []})
    moe = MixtureOfExperts(
        num_experts=config.get("num_local_experts") or config["num_experts"],
        experts_per_token=config["num_experts_per_tok"],
        norm_topk_prob=config["norm_topk_prob"],
    )
    experts = Experts(
        ffn_hidden_size=config["moe_intermediate_size"],
        shared_ffn_hidden_size=config["shared_expert_intermediate_size"],
        shared_gate=True,
        shared_name="shared_expert",
        moe=moe,
    )
    return model(config, family, experts, joined=joined)


def model(config: dict[str, Any], family: str, mlp: MLPPart, *, joined: bool) -> Architecture:
    """Stack layers of both kinds of attention.

    Args:
        mlp: of every layer.
        joined: as of `GatedDelta`.
    """
    config = _DEFAULTS | config
    # Llama's layer, of which the attention alone is used
    layer = llama.layer(config | {"layer_types": None, "intermediate_size": 1}, family, partial_rotary=True)
    full = replace(layer, mlp=mlp).with_attention(qk_norm=True, zero_centered_norms=True, output_gate=True)
    linear = replace(
        full,
        attention=GatedDelta(
            num_key_heads=config["linear_num_key_heads"],
            num_value_heads=config["linear_num_value_heads"],
            key_head_dim=config["linear_key_head_dim"],
            value_head_dim=config["linear_value_head_dim"],
            conv_kernel=config["linear_conv_kernel_dim"],
            joined=joined,
        ),
    )
    base = llama.model(config, family, full)
    layers = alternating(config, {LINEAR: linear, FULL: full}, base.num_layers, every="full_attention_interval")
    if full not in (kind for kind, _ in layers):
        raise ValueError(f"layer_types without {FULL!r} is not supported")
    return replace(base, layers=layers, zero_centered_norms=True)
