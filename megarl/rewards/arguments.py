"""Checks the values of `reward.args` against the annotations of the function that takes them."""

from __future__ import annotations

import inspect
import math
import typing
from collections.abc import Callable, Mapping
from typing import Any

import regex

NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
"""Kinds of parameters that a value is given to by name."""


def check_types(function: Callable[..., Any], args: Mapping[str, Any]) -> None:
    """Raise ValueError for a value of another type than its parameter's; whole numbers are numbers too."""
    from pydantic import TypeAdapter, ValidationError

    hints = typing.get_type_hints(function)
    for name, value in args.items():
        if name not in hints:
            continue
        try:
            TypeAdapter(hints[name]).validate_python(value, strict=True)
        except ValidationError as e:
            reason = e.errors(include_url=False)[0]["msg"]
            raise ValueError(f"{name} = {value!r:.80}: {reason[0].lower()}{reason[1:]}") from e


def check_pattern(pattern: str, name: str, *, groups: int | None = None) -> None:
    """Raise ValueError for a text that is no regular expression, or one with another number of groups."""
    try:
        expression = regex.compile(pattern)
    except (regex.error, OverflowError, RecursionError) as e:
        raise ValueError(f"{name} = {pattern!r:.80} is no regular expression: {e}") from e
    if groups is not None and expression.groups != groups:
        raise ValueError(f"{name} = {pattern!r:.80} needs {groups} group in brackets, and has {expression.groups}")


def check_timeout(timeout: float) -> None:
    """Raise ValueError unless a timeout is a finite number of seconds, more than 0."""
    if not 0 < timeout < math.inf:
        raise ValueError(f"timeout = {timeout!r} must be seconds, more than 0")
