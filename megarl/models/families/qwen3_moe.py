"""Describes Qwen3-MoE (arXiv 2505.09388): Qwen3 with experts in every layer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megarl.models.architecture import Architecture
from megarl.models.families import llama, qwen2
from megarl.models.families.fields import check_only
from megarl.models.parts.experts import Experts, MixtureOfExperts


def architecture(config: dict[str, Any]) -> Architecture:
    """Read a Hugging Face `Qwen3MoeConfig`; raises KeyError for a missing field, ValueError for an unsupported one."""
    check_only(config, "qwen3_moe", {"decoder_sparse_step": 1, "mlp_only_layers": []})
    moe = MixtureOfExperts(
        num_experts=config.get("num_local_experts") or config["num_experts"],  # transformers 5, 4
        experts_per_token=config["num_experts_per_tok"],
        norm_topk_prob=config.get("norm_topk_prob", False),
    )
    kind = qwen2.layer(config, "qwen3_moe").with_attention(qk_norm=True)
    # intermediate_size is the width of the layers without experts, of which there are none
    experts = Experts(ffn_hidden_size=config["moe_intermediate_size"], moe=moe)
    return llama.model(config, "qwen3_moe", replace(kind, mlp=experts))
