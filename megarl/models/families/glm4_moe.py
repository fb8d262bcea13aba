"""GLM-4.5, 4.6 and 4.7 (arXiv 2508.06471): a few dense layers, then DeepSeek-V3's mixture of experts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megarl.models.architecture import Architecture, Layer
from megarl.models.families import llama
from megarl.models.parts.experts import Experts, MixtureOfExperts


def architecture(config: dict[str, Any]) -> Architecture:
    """From a Hugging Face `Glm4MoeConfig`; raises KeyError for a missing field, ValueError for an unsupported one."""
    config = {"partial_rotary_factor": 0.5, "rms_norm_eps": 1e-5} | config
    kind = llama.layer(config | {"attention_bias": False}, "glm4_moe", partial_rotary=True)
    dense = kind.with_attention(
        qkv_bias=bool(config.get("attention_bias", False)), qk_norm=bool(config.get("use_qk_norm", False))
    )
    first, count = config.get("first_k_dense_replace", 1), config["num_hidden_layers"]
    if type(first) is not int or first < 0:
        raise ValueError(f"glm4_moe: first_k_dense_replace must be a whole number from 0 on, not {first!r:.40}")
    runs = ((dense, min(first, count)), (replace(dense, mlp=_experts(config)), max(0, count - first)))
    layers: tuple[tuple[Layer, int], ...] = tuple(run for run in runs if run[1] != 0)
    return replace(llama.model(config, "glm4_moe", dense), layers=layers)


def _experts(config: dict[str, Any]) -> Experts:
    moe = MixtureOfExperts(
        num_experts=config.get("num_local_experts") or config["n_routed_experts"],
        experts_per_token=config["num_experts_per_tok"],
        norm_topk_prob=config.get("norm_topk_prob", True),
        score_function="sigmoid",
        correction_bias=True,
        num_groups=config.get("n_group", 1),
        groups_per_token=config.get("topk_group", 1),
        scaling_factor=config.get("routed_scaling_factor", 1.0),
    )
    width = config["moe_intermediate_size"]
    return Experts(ffn_hidden_size=width, shared_ffn_hidden_size=width * config.get("n_shared_experts", 1), moe=moe)
