"""Qwen3 (arXiv 2505.09388): Llama with RMSNorm on queries and keys."""

from __future__ import annotations

from typing import Any

from megarl.models.architecture import Architecture
from megarl.models.families import llama


def architecture(config: dict[str, Any]) -> Architecture:
    """Fields of a Hugging Face `Qwen3Config`; raises KeyError for a missing one, ValueError for an unsupported one."""
    if config.get("use_sliding_window"):
        raise ValueError("qwen3: use_sliding_window = true is not supported")
    return Architecture(**llama.fields(config, "qwen3"), qk_norm=True)
