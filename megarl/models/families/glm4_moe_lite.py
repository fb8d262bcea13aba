"""Describes GLM-4.7-Flash: GLM's mixture of experts behind DeepSeek-V3's latent attention."""

from __future__ import annotations

from typing import Any

from megarl.models.architecture import Architecture
from megarl.models.families import deepseek_v3

_DEFAULTS: dict[str, Any] = {
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.8,
    "rms_norm_eps": 1e-5,
}
"""Those of transformers' `Glm4MoeLiteConfig`."""


def architecture(config: dict[str, Any]) -> Architecture:
    """Read a `Glm4MoeLiteConfig`; raises KeyError for a missing field, ValueError for an unsupported one."""
    config = _DEFAULTS | config
    count = config["num_hidden_layers"]
    kinds = config.get("mlp_layer_types") or ["dense"] + ["sparse"] * (count - 1)
    first = kinds.count("dense")
    if kinds != ["dense"] * first + ["sparse"] * (count - first):
        raise ValueError("glm4_moe_lite: mlp_layer_types other than dense layers before sparse ones is not supported")
    return deepseek_v3.with_latent_attention(config | {"first_k_dense_replace": first}, "glm4_moe_lite")
