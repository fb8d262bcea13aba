"""Copies from the CPU without a wait for the GPU's queue."""

from __future__ import annotations

import torch
from torch import Tensor


def upload(x: Tensor, device: torch.device) -> Tensor:
    """Copy a CPU tensor to a device.

    A plain `.to` of pageable memory returns only when all kernels before it are done, and the GPU then idles until
    the next ones are launched.
    """
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x.to(device)
