"""Keeps users' code from changing torch for what comes behind it. Torch-free."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def torch_as_before() -> Iterator[None]:
    """Put back afterwards whether gradients are computed, and torch's default data type."""
    torch = sys.modules.get("torch")
    if torch is None:
        yield
        return
    gradients, dtype = torch.is_grad_enabled(), torch.get_default_dtype()
    try:
        yield
    finally:
        torch.set_grad_enabled(gradients)
        torch.set_default_dtype(dtype)
