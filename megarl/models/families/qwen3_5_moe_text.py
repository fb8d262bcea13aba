"""Describes Qwen3.5's and 3.6's language models with experts: Qwen3-Next's layers, with more matrices in files."""

from __future__ import annotations

from typing import Any

from megarl.models.architecture import Architecture
from megarl.models.families import qwen3_next


def architecture(config: dict[str, Any]) -> Architecture:
    """Read a `Qwen3_5MoeTextConfig`; raises KeyError for a missing field, ValueError for an unsupported one."""
    config = config | {"norm_topk_prob": True}  # transformers does not read the field
    return qwen3_next.with_experts(config, "qwen3_5_moe_text", joined=False)
