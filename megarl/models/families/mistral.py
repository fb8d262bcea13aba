"""Describes Mistral (arXiv 2310.06825): Llama with a sliding window, at least as long as the longest sequence."""

from __future__ import annotations

from typing import Any

from megarl.models.architecture import Architecture, Layer
from megarl.models.families import llama


def architecture(config: dict[str, Any]) -> Architecture:
    """Read a Hugging Face `MistralConfig`; raises KeyError for a missing field, ValueError for an unsupported one."""
    defaults = {"sliding_window": 4096}  # only null is no window
    config = defaults | config
    return llama.model(config, "mistral", layer(config, "mistral"))


def layer(config: dict[str, Any], family: str) -> Layer:
    """Read Llama's layer; raises ValueError if the sliding window is shorter than the longest sequence."""
    window, longest = config.get("sliding_window"), config["max_position_embeddings"]
    if window is not None and window < longest:
        raise ValueError(
            f"{family}: sliding_window = {window} is less than max_position_embeddings = {longest}, and windows are "
            f"not supported; set max_position_embeddings to {window} in config.json to use sequences up to that length"
        )
    return llama.layer(config, family)
