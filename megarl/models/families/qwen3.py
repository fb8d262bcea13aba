"""Qwen3 (arXiv 2505.09388): Llama with RMSNorm on queries and keys, and heads of a width of their own."""

from __future__ import annotations

from typing import Any

from megarl.models.architecture import Architecture
from megarl.models.families import qwen2


def architecture(config: dict[str, Any]) -> Architecture:
    """From a Hugging Face `Qwen3Config`; raises KeyError for a missing field, ValueError for an unsupported one."""
    return Architecture(**qwen2.fields(config, "qwen3") | dict(head_dim=config["head_dim"]), qk_norm=True)
