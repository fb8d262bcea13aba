"""Describes MiniMax-M2: Mixtral with sigmoid scores, norms over all heads, and heads of which a part is rotated."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megarl.models.architecture import Architecture
from megarl.models.families import llama, mixtral
from megarl.models.families.fields import check_not_quantized, check_only

_ONLY: dict[str, Any] = {
    "scoring_func": "sigmoid",
    "use_routing_bias": True,
    "use_qk_norm": True,
    "qk_norm_type": "per_layer",
    "shared_intermediate_size": 0,
}
"""Values of fields beside which no other is supported; transformers' `MiniMaxM2Config` has none of them."""


def architecture(config: dict[str, Any]) -> Architecture:
    """Read a `MiniMaxM2Config`; raises KeyError for a missing field, ValueError for an unsupported one."""
    check_only(config, "minimax_m2", _ONLY)
    if any(kind != 1 for kind in config.get("attn_type_list") or []):
        raise ValueError("minimax_m2: attn_type_list with another number than 1, full attention, is not supported")
    check_not_quantized(config, "minimax_m2")
    config = {"rope_theta": 5_000_000.0, **config}
    if config.get("rotary_dim") is not None:
        config = {"partial_rotary_factor": config["rotary_dim"] / config["head_dim"], **config}
    kind = llama.layer(config, "minimax_m2", partial_rotary=True).with_attention(qk_norm=True, norm_over_heads=True)
    experts = mixtral.experts(config)
    moe = replace(experts.moe, score_function="sigmoid", correction_bias=True, bias_name="e_score_correction_bias")
    return llama.model(config, "minimax_m2", replace(kind, mlp=replace(experts, moe=moe)))
