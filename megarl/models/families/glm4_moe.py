"""Describes GLM-4.5, 4.6 and 4.7 (arXiv 2508.06471): a few dense layers, then DeepSeek-V3's mixture of experts."""

from __future__ import annotations

from typing import Any

from megarl.models.architecture import Architecture
from megarl.models.families import deepseek_v3, llama

_DEFAULTS: dict[str, Any] = {
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-5,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.0,
}


def architecture(config: dict[str, Any]) -> Architecture:
    """Read a Hugging Face `Glm4MoeConfig`; raises KeyError for a missing field, ValueError for an unsupported one."""
    config = _DEFAULTS | config
    kind = llama.layer(config | {"attention_bias": False}, "glm4_moe", partial_rotary=True)
    dense = kind.with_attention(
        qkv_bias=bool(config.get("attention_bias", False)), qk_norm=bool(config.get("use_qk_norm", False))
    )
    return deepseek_v3.model(config, "glm4_moe", dense)
