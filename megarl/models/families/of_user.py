"""Finds the family that a user's own file describes: `actor_rollout_ref.model.family`, or MEGARL_FAMILY. Torch-free.

The environment tells it to processes that this one starts. A file that a run's folder or a model's names is not read:
only what the caller names.
"""

from __future__ import annotations

import os
from typing import Any

from megarl.models.architecture import Architecture
from megarl.registry import Registry

VARIABLE = "MEGARL_FAMILY"
_FAMILIES: Registry[Any] = Registry("actor_rollout_ref.model.family", "function")
_replaced: dict[str, str] = {}
"""What `use_family` has put into the environment, and what was there before."""


def use_family(file: str) -> None:
    """Let this process, and those that it starts, read unknown models with path/to/file.py:function.

    Args:
        file: empty: whatever the environment named before this function changed it.

    Raises:
        ValueError: there is no such file or function, or importing it fails; nothing has changed.
    """
    path, _, name = file.rpartition(":")
    named = f"{os.path.abspath(path)}:{name}" if path else file
    if named:
        _FAMILIES.check(named)
    current = os.environ.get(VARIABLE, "")
    of_caller = _replaced.pop(current, current)
    if named:
        _replaced[named] = of_caller
    os.environ[VARIABLE] = named or of_caller


def is_named() -> bool:
    """Say whether there is a family of the user's."""
    return bool(os.environ.get(VARIABLE))


def architecture(config: dict[str, Any]) -> Architecture:
    """Read a `config.json` with the user's function. Raises ValueError if that returns no `Architecture`."""
    named = os.environ[VARIABLE]
    arch = _FAMILIES.load(named)(config)
    if not isinstance(arch, Architecture):
        raise ValueError(f"{named} must return a megarl Architecture, not {type(arch).__name__}")
    return arch
