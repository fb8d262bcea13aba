"""Qwen3-Next: three layers with gated delta nets, then one with gated attention; experts, and a gated one for all."""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby
from typing import Any

from megarl.models.architecture import Architecture
from megarl.models.families import llama
from megarl.models.parts.experts import Experts, MixtureOfExperts
from megarl.models.parts.gated_delta import GatedDelta
from megarl.models.parts.part import MLPPart

LINEAR, FULL = "linear_attention", "full_attention"
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
    """From a Hugging Face `Qwen3NextConfig`; raises KeyError for a missing field, ValueError for an unsupported one."""
    return with_experts(config, "qwen3_next", joined=True)


def with_experts(config: dict[str, Any], family: str, *, joined: bool) -> Architecture:
    """Read a model with experts in every layer.

    Args:
        joined: as of `GatedDelta`.
    """
    config = _DEFAULTS | config
    for key, supported in (("decoder_sparse_step", 1), ("mlp_only_layers", [])):
        if (config.get(key) or supported) != supported:
            raise ValueError(f"{family}: {key} = {config[key]!r} is not supported (only {supported!r})")
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
    # of Llama's layer the attention alone
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
    kinds, base = {LINEAR: linear, FULL: full}, llama.model(config, family, full)
    types = _layer_types(config, base.num_layers)
    layers = tuple((kinds[kind], len(list(run))) for kind, run in groupby(types))
    return replace(base, layers=layers, zero_centered_norms=True)


def _layer_types(config: dict[str, Any], count: int) -> list[str]:
    """List the kind of each layer, of `count`: those of `layer_types`, or full attention in every n-th."""
    types, every = config.get("layer_types"), config["full_attention_interval"]
    if types is None:
        if type(every) is not int or every < 1:
            raise ValueError(f"full_attention_interval must be a whole number from 1 on, not {every!r:.40}")
        types = [FULL if (i + 1) % every == 0 else LINEAR for i in range(count)]
    if len(types) != count or not set(types) <= {LINEAR, FULL}:
        raise ValueError(f"layer_types must be {LINEAR!r} or {FULL!r} for each of the {count} layers")
    if FULL not in types:
        raise ValueError(f"layer_types without {FULL!r} is not supported")
    return list(types)
