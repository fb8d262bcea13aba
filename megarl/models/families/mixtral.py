"""Describes Mixtral (arXiv 2401.04088): Mistral with experts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megarl.models.architecture import Architecture
from megarl.models.families import llama, mistral
from megarl.models.parts.experts import Experts, MixtureOfExperts


def architecture(config: dict[str, Any]) -> Architecture:
    """Read a Hugging Face `MixtralConfig`; raises KeyError for a missing field, ValueError for an unsupported one."""
    config = {"rope_theta": 1_000_000.0, "rms_norm_eps": 1e-5} | config
    return llama.model(config, "mixtral", replace(mistral.layer(config, "mixtral"), mlp=experts(config)))


def experts(config: dict[str, Any]) -> Experts:
    """Read the experts, whose files name them otherwise than those of other families."""
    moe = MixtureOfExperts(
        num_experts=config["num_local_experts"],
        experts_per_token=config["num_experts_per_tok"],
        norm_topk_prob=True,
        module="block_sparse_moe",
        gate_proj="w1",
        up_proj="w3",
        down_proj="w2",
    )
    return Experts(ffn_hidden_size=config["intermediate_size"], moe=moe)
