"""Looks up the activation of a gated MLP's gate, by the name that its part gives it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch.nn.functional as F
from torch import Tensor


def quick_gelu(x: Tensor) -> Tensor:
    """Compute x sigmoid(1.702 x), close to GELU (arXiv 1606.08415)."""
    return x * (1.702 * x).sigmoid()


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "quick_gelu": quick_gelu,
}
