"""Describes Qwen3 (arXiv 2505.09388): Llama with RMSNorm on queries and keys, and heads of a width of their own."""

from __future__ import annotations

from typing import Any

from megarl.models.architecture import Architecture
from megarl.models.families import llama, qwen2


def architecture(config: dict[str, Any]) -> Architecture:
    """Read a Hugging Face `Qwen3Config`; raises KeyError for a missing field, ValueError for an unsupported one."""
    kind = qwen2.layer(config, "qwen3").with_attention(head_dim=config["head_dim"], qk_norm=True)
    return llama.model(config, "qwen3", kind)
