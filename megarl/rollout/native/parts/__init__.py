"""Computes the parts of a layer in the native engine: a module here is named as its part in `megarl.models.parts`.

It has a class `Weights`, and for attention a class `Passes`, as `megarl.rollout.native.parts.part` describes them.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from megarl.models.parts.part import Part


def module_of(part: Part) -> Any:
    """Import the module that computes a part."""
    return import_module(f"{__name__}.{type(part).__module__.rpartition('.')[2]}")
