"""Qwen2 and Qwen2.5 (arXiv 2407.10671): Llama with biases on q, k and v."""

from __future__ import annotations

from typing import Any

from megarl.models.architecture import Architecture
from megarl.models.families import llama


def architecture(config: dict[str, Any]) -> Architecture:
    """Fields of a Hugging Face `Qwen2Config`; raises KeyError for a missing one, ValueError for an unsupported one."""
    if config.get("use_sliding_window"):
        raise ValueError("qwen2: use_sliding_window = true is not supported")
    return Architecture(**llama.fields(config, "qwen2"), qkv_bias=True)
