"""Describes Qwen2 and Qwen2.5 (arXiv 2407.10671): Llama with biases on q, k and v."""

from __future__ import annotations

from typing import Any

from megarl.models.architecture import Architecture, Layer
from megarl.models.families import llama


def architecture(config: dict[str, Any]) -> Architecture:
    """Read a Hugging Face `Qwen2Config`; raises KeyError for a missing field, ValueError for an unsupported one."""
    return llama.model(config, "qwen2", layer(config, "qwen2").with_attention(qkv_bias=True))


def layer(config: dict[str, Any], family: str) -> Layer:
    """Read Llama's layer; `sliding_window` and `max_window_layers` mean nothing while `use_sliding_window` is false."""
    if config.get("use_sliding_window"):
        raise ValueError(f"{family}: use_sliding_window = true is not supported")
    return llama.layer(config, family)
