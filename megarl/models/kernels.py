"""Which kernels there are beside torch's own."""

from __future__ import annotations

import importlib.util

import torch

TRITON = torch.cuda.is_available() and importlib.util.find_spec("triton") is not None
"""Whether Triton can compile kernels for this machine."""


def transformer_engine_available() -> bool:
    """Whether Transformer Engine is installed and there is a GPU to run it."""
    return torch.cuda.is_available() and importlib.util.find_spec("transformer_engine") is not None


def layer_kernels(transformer_engine: bool) -> str:
    """What the layers of a training model run on, for people."""
    if transformer_engine:
        return "Transformer Engine layers (fused attention, norm + linear, rotary embedding)"
    if torch.cuda.is_available():
        return "torch layers (FlashAttention, fused norm)" + (", rotary embedding in Triton" if TRITON else "")
    return "torch layers"


def adam_kernels(adam: type) -> str:
    """Whose Adam the optimizer runs on, and what is absent if it is torch's, for people."""
    package = adam.__module__.partition(".")[0]
    names = {"transformer_engine": "Transformer Engine's fused Adam", "apex": "apex's fused Adam"}
    return names.get(package, "torch's Adam (no Transformer Engine, no apex)")
