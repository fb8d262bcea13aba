"""A family of a user's own: Seed-OSS, which is Llama with biases on queries, keys and values, and wide heads."""

from __future__ import annotations

from typing import Any

from megarl.models.architecture import Architecture
from megarl.models.families import llama


def architecture(config: dict[str, Any]) -> Architecture:
    """Read a Hugging Face `SeedOssConfig`."""
    if config.get("attention_out_bias"):
        raise ValueError("seed_oss: attention_out_bias = true is not supported")
    bias = bool(config.get("attention_bias", True))
    kind = llama.layer(config | {"attention_bias": False}, "seed_oss")
    return llama.model(config, "seed_oss", kind.with_attention(qkv_bias=bias))
