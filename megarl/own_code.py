"""Names users' code that fails, and keeps it from changing torch for what comes behind it. Torch-free."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class OwnCodeError(ValueError):
    """Raised where a user's code fails, or returns what it must not; the message is one line that names the code.

    Attributes:
        everywhere: it is raised on every rank alike, and the models are in step.
    """

    def __init__(self, message: str, *, everywhere: bool = False) -> None:
        super().__init__(message)
        self.everywhere = everywhere


def name_of(code: Any) -> str:
    """Return the name of a function, or of the class of another object."""
    return str(getattr(code, "__qualname__", type(code).__qualname__))


def form_of(value: Any) -> str:
    """Describe what a user's code returned, in one line."""
    shape = getattr(value, "shape", None)
    return type(value).__name__ if shape is None else f"a tensor {list(shape)}"


def in_a_line(error: BaseException) -> str:
    """Write an exception's type and message in one line of at most 300 characters."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def is_async(function: Any) -> bool:
    """Tell whether a call only makes a coroutine, which somebody must await."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def check_runs(function: Any, called: str) -> None:
    """Refuse what cannot be called, and an `async def`, whose call runs nothing.

    Args:
        called: how messages call it: "the callback tell".

    Raises:
        OwnCodeError: it is one of these.
    """
    if not callable(function):
        raise OwnCodeError(f"{called} is no function, but {form_of(function)}")
    if is_async(function):
        raise OwnCodeError(f"{called} is an async def, which nothing would await: make it a def")


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
