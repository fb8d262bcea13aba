"""Llama (arXiv 2302.13971, 2407.21783): the family that the others differ from."""

from __future__ import annotations

from typing import Any

from megarl.models.architecture import Architecture


def architecture(config: dict[str, Any]) -> Architecture:
    """Fields of a Hugging Face `LlamaConfig`; raises KeyError for a missing one, ValueError for an unsupported one."""
    return Architecture(**fields(config, "llama"))


def fields(config: dict[str, Any], family: str) -> dict[str, Any]:
    """The fields that every Llama-like family shares."""
    for key, wanted in (("hidden_act", "silu"), ("mlp_bias", False), ("attention_bias", False)):
        if config.get(key, wanted) != wanted:
            raise ValueError(f"{family}: {key} = {config[key]!r} is not supported (only {wanted!r})")
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if rope.get("rope_type", "default") != "default":
        raise ValueError(f"{family}: rope type {rope['rope_type']!r} is not supported (only 'default')")
    heads = config["num_attention_heads"]
    return dict(
        family=family,
        num_layers=config["num_hidden_layers"],
        hidden_size=config["hidden_size"],
        ffn_hidden_size=config["intermediate_size"],
        num_attention_heads=heads,
        num_key_value_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        vocab_size=config["vocab_size"],
        max_position_embeddings=config["max_position_embeddings"],
        tie_word_embeddings=config.get("tie_word_embeddings", False),
        norm_eps=config.get("rms_norm_eps", 1e-6),
        rope_theta=rope.get("rope_theta") or config.get("rope_theta", 10_000.0),
        init_std=config.get("initializer_range", 0.02),
    )
