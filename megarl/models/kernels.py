"""Says which kernels there are beside torch's own."""

from __future__ import annotations

import importlib.util

import torch

TRITON = torch.cuda.is_available() and importlib.util.find_spec("triton") is not None
"""Whether Triton can compile kernels for this machine."""


def transformer_engine_available() -> bool:
    """Say whether Transformer Engine is installed and there is a GPU to run it."""
    return torch.cuda.is_available() and importlib.util.find_spec("transformer_engine") is not None


def adam_kernels(adam: type) -> str:
    """Name the package of an Adam, and what is absent if it is torch's, for people."""
    package = adam.__module__.partition(".")[0]
    names = {"transformer_engine": "Transformer Engine's fused Adam", "apex": "apex's fused Adam"}
    return names.get(package, "torch's Adam (no Transformer Engine, no apex)")
