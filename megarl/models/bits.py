"""Looks at numbers as their bits, of which sums are exact, in any order."""

from __future__ import annotations

import torch
from torch import Tensor

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer type with the bits of an element, by element size in bytes."""


def bits_of(tensor: Tensor) -> Tensor:
    """View the elements as integers, in row-major order; copies a tensor that is not contiguous."""
    return tensor.view(_INTEGERS[tensor.element_size()]).reshape(-1)
