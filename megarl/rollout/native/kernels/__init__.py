"""Holds the native engine's Triton kernels. Triton comes with torch on GPUs; without it, plain torch does the same."""

from __future__ import annotations

from importlib.util import find_spec

import torch

_INSTALLED = find_spec("triton") is not None


def on(device: torch.device) -> bool:
    """Return whether the kernels run on a device. The modules beside this file can be imported only then."""
    return _INSTALLED and device.type == "cuda"
