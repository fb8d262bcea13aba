"""Describes Gemma 3's language model (arXiv 2503.19786): sliding windows, full attention in every sixth layer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megarl.models.architecture import Architecture, Layer
from megarl.models.families import llama
from megarl.models.families.fields import FULL, SLIDING, alternating, check_only, window_of
from megarl.models.parts.grouped_query import GroupedQuery
from megarl.models.parts.swiglu import SwiGLU

_DEFAULTS: dict[str, Any] = {
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
    "rope_local_base_freq": 10_000.0,
    "sliding_window": 4096,
    "sliding_window_pattern": 6,
    "tie_word_embeddings": True,
}
_ONLY: dict[str, Any] = {
    "hidden_activation": "gelu_pytorch_tanh",
    "attention_bias": False,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "use_bidirectional_attention": False,
}


def architecture(config: dict[str, Any]) -> Architecture:
    """Read a Hugging Face `Gemma3TextConfig`; raises KeyError for a missing field, ValueError for one unsupported."""
    config = _DEFAULTS | config
    check_only(config, "gemma3_text", _ONLY)
    if not isinstance(scalar := config["query_pre_attn_scalar"], int | float) or not 0 < scalar < float("inf"):
        raise ValueError(f"query_pre_attn_scalar must be a finite number above 0, not {scalar!r:.40}")
    kinds = {kind: _layer(config, kind) for kind in (SLIDING, FULL)}
    model = llama.model(config, "gemma3_text", kinds[FULL])
    return replace(
        model,
        layers=alternating(config, kinds, model.num_layers, every="sliding_window_pattern"),
        zero_centered_norms=True,
        embedding_scale=config["hidden_size"] ** 0.5,
    )


def _layer(config: dict[str, Any], kind: str) -> Layer:
    heads, window = config["num_attention_heads"], window_of(config, "gemma3_text")
    attention = GroupedQuery(
        num_attention_heads=heads,
        num_key_value_heads=config.get("num_key_value_heads") or heads,
        head_dim=config["head_dim"],
        qk_norm=True,
        zero_centered_norms=True,
        sliding_window=window if kind == SLIDING else None,
        softmax_scale=config["query_pre_attn_scalar"] ** -0.5,
        **_rope(config, kind),
    )
    mlp = SwiGLU(ffn_hidden_size=config["intermediate_size"], activation="gelu_tanh")
    return Layer(attention=attention, mlp=mlp, output_norms=True)


def _rope(config: dict[str, Any], kind: str) -> dict[str, Any]:
    """Read base and scaling of a kind of layer; `rope_scaling`, of transformers 4, is the full layers'."""
    ropes = config.get("rope_parameters") or {}
    if any(not isinstance(rope, dict | None) for rope in ropes.values()):
        raise ValueError(f"gemma3_text: rope_parameters must be those of {SLIDING!r} and of {FULL!r}")
    base, scaling = ("rope_theta", config.get("rope_scaling") or {}) if kind == FULL else ("rope_local_base_freq", {})
    return llama.rope_of((ropes.get(kind) or {}) | scaling, {"rope_theta": config[base]}, "gemma3_text")
