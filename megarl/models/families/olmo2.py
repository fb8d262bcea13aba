"""Describes OLMo 2 (arXiv 2501.00656): Llama with norms after attention and MLP, not before, and on query and key."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megarl.models.architecture import Architecture
from megarl.models.families import llama


def architecture(config: dict[str, Any]) -> Architecture:
    """Read a Hugging Face `Olmo2Config`; raises KeyError for a missing field, ValueError for an unsupported one."""
    config = {"rms_norm_eps": 1e-5} | config
    kind = llama.layer(config, "olmo2").with_attention(qk_norm=True, norm_over_heads=True)
    return llama.model(config, "olmo2", replace(kind, input_norms=False, output_norms=True))
