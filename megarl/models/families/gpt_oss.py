"""Describes gpt-oss (arXiv 2508.10925): attention sinks, windows in every second layer, experts with biases and a
clamped GLU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megarl.models.architecture import Architecture, Layer
from megarl.models.families import llama
from megarl.models.families.fields import FULL, SLIDING, alternating, check_only, window_of
from megarl.models.parts.experts import MixtureOfExperts
from megarl.models.parts.grouped_query import GroupedQuery
from megarl.models.parts.stacked_experts import StackedExperts

_DEFAULTS: dict[str, Any] = {
    "head_dim": 64,
    "max_position_embeddings": 131_072,
    "num_experts_per_tok": 4,
    "rms_norm_eps": 1e-5,
    "rope_theta": 150_000.0,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
}
_YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
"""What transformers takes where the configuration says nothing of the rotary embedding."""
_ONLY: dict[str, Any] = {"hidden_act": "silu", "attention_bias": True, "swiglu_alpha": 1.702}


def architecture(config: dict[str, Any]) -> Architecture:
    """Read a Hugging Face `GptOssConfig`; raises KeyError for a missing field, ValueError for an unsupported one."""
    if (quantization := config.get("quantization_config")) is not None:
        method = quantization.get("quant_method")
        raise ValueError(
            f"gpt_oss: weights quantized by {method!r:.40} are not read; save them in bfloat16, with transformers' "
            "Mxfp4Config(dequantize=True)"
        )
    check_only(config, "gpt_oss", _ONLY)
    config = _DEFAULTS | {"sliding_window_pattern": 2} | config
    if not (config.get("rope_parameters") or config.get("rope_scaling")):
        config = config | {"rope_scaling": _YARN}
    kinds = {kind: _layer(config, kind) for kind in (SLIDING, FULL)}
    model = llama.model(config, "gpt_oss", kinds[FULL])
    return replace(model, layers=alternating(config, kinds, model.num_layers, every="sliding_window_pattern"))


def _layer(config: dict[str, Any], kind: str) -> Layer:
    heads, window = config["num_attention_heads"], window_of(config, "gpt_oss")
    attention = GroupedQuery(
        num_attention_heads=heads,
        num_key_value_heads=config.get("num_key_value_heads") or heads,
        head_dim=config["head_dim"],
        qkv_bias=True,
        output_bias=True,
        sinks=True,
        sliding_window=window if kind == SLIDING else None,
        **llama.rope(config, "gpt_oss", {"default": lambda rope: None, "yarn": llama.yarn}),
    )
    moe = MixtureOfExperts(
        num_experts=config.get("num_local_experts") or config["num_experts"],
        experts_per_token=config["num_experts_per_tok"],
        norm_topk_prob=True,  # a softmax over the chosen alone
        logit_bias=True,
        gate="router",
    )
    experts = StackedExperts(ffn_hidden_size=config["intermediate_size"], moe=moe, limit=config["swiglu_limit"])
    return Layer(attention=attention, mlp=experts)
