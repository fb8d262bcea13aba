"""Describes DeepSeek-V3 (arXiv 2412.19437), Moonlight (arXiv 2502.16982) and Kimi-K2: latent attention, and experts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megarl.models.architecture import Architecture, Layer
from megarl.models.families import llama
from megarl.models.families.fields import check_not_quantized, check_only
from megarl.models.parts.experts import Experts, MixtureOfExperts
from megarl.models.parts.latent import Latent
from megarl.models.parts.rotary import Yarn
from megarl.models.parts.swiglu import SwiGLU

_DEFAULTS: dict[str, Any] = {
    "first_k_dense_replace": 3,
    "n_group": 8,
    "topk_group": 4,
    "routed_scaling_factor": 2.5,
    "rms_norm_eps": 1e-6,
}
"""Those of transformers' `DeepseekV3Config`."""

_ONLY: dict[str, Any] = {
    "hidden_act": "silu",
    "attention_bias": False,
    "rope_interleave": True,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "moe_layer_freq": 1,
    "partial_rotary_factor": 1.0,
}
"""Values of fields beside which no other is supported."""


def architecture(config: dict[str, Any]) -> Architecture:
    """Read a `DeepseekV3Config`; raises KeyError for a missing field, ValueError for an unsupported one."""
    return with_latent_attention(_DEFAULTS | config, "deepseek_v3")


def with_latent_attention(config: dict[str, Any], family: str) -> Architecture:
    """Read a model of these layers.

    Args:
        config: with every field that has a default in the family.
    """
    heads = config["num_attention_heads"]
    rope = llama.rope(config, family, {"default": lambda rope: None, "yarn": _yarn})
    check_only(config | rope, family, _ONLY | {"num_key_value_heads": heads})
    check_not_quantized(config, family)
    attention = Latent(
        num_attention_heads=heads,
        kv_lora_rank=config["kv_lora_rank"],
        q_lora_rank=config["q_lora_rank"],
        qk_nope_head_dim=config["qk_nope_head_dim"],
        qk_rope_head_dim=config["qk_rope_head_dim"],
        v_head_dim=config["v_head_dim"],
        rope_theta=rope["rope_theta"],
        rope_scaling=rope["rope_scaling"],
    )
    dense = Layer(attention=attention, mlp=SwiGLU(ffn_hidden_size=config["intermediate_size"]))
    return model(config, family, dense)


def _yarn(rope: dict[str, Any]) -> Yarn:
    """Read YaRN's fields; what transformers reads otherwise than DeepSeek-V3's own configs need is refused."""
    if rope.get("attention_factor") is not None or not rope.get("truncate", True):
        raise ValueError("deepseek_v3: attention_factor and truncate of rope type 'yarn' are not supported")
    scales = [rope.get("mscale"), rope.get("mscale_all_dim")]
    if bool(scales[0]) != bool(scales[1]):
        raise ValueError("deepseek_v3: rope type 'yarn' needs both of mscale and mscale_all_dim, or neither")
    return Yarn(
        factor=rope["factor"],
        original_max_position_embeddings=rope["original_max_position_embeddings"],
        beta_fast=rope.get("beta_fast") or 32.0,
        beta_slow=rope.get("beta_slow") or 1.0,
        mscale=scales[0] or 1.0,
        mscale_all_dim=scales[1] or 0.0,
    )


def model(config: dict[str, Any], family: str, dense: Layer) -> Architecture:
    """Stack a few dense layers, then those with experts.

    Args:
        config: with every field that has a default in the family.
        dense: the kind of the first layers.
    """
    first, count = config["first_k_dense_replace"], config["num_hidden_layers"]
    if type(first) is not int or first < 0:
        raise ValueError(f"{family}: first_k_dense_replace must be a whole number from 0 on, not {first!r:.40}")
    runs = ((dense, min(first, count)), (replace(dense, mlp=_experts(config)), max(0, count - first)))
    layers: tuple[tuple[Layer, int], ...] = tuple(run for run in runs if run[1] != 0)
    return replace(llama.model(config, family, dense), layers=layers)


def _experts(config: dict[str, Any]) -> Experts:
    moe = MixtureOfExperts(
        num_experts=config.get("num_local_experts") or config["n_routed_experts"],
        experts_per_token=config["num_experts_per_tok"],
        norm_topk_prob=config.get("norm_topk_prob", True),
        score_function="sigmoid",
        correction_bias=True,
        num_groups=config["n_group"],
        groups_per_token=config["topk_group"],
        scaling_factor=config["routed_scaling_factor"],
    )
    width = config["moe_intermediate_size"]
    return Experts(ffn_hidden_size=width, shared_ffn_hidden_size=width * config.get("n_shared_experts", 1), moe=moe)
