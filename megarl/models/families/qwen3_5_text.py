"""Describes Qwen3.5's and 3.6's language models without experts: Qwen3-Next's layers, with more matrices in files."""

from __future__ import annotations

from typing import Any

from megarl.models.architecture import Architecture
from megarl.models.families import qwen3_next
from megarl.models.parts.swiglu import SwiGLU


def architecture(config: dict[str, Any]) -> Architecture:
    """Read a Hugging Face `Qwen3_5TextConfig`; raises KeyError for a missing field, ValueError for one unsupported."""
    mlp = SwiGLU(ffn_hidden_size=config["intermediate_size"])
    return qwen3_next.model(config, "qwen3_5_text", mlp, joined=False)
