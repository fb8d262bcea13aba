"""Names of reward functions, and loading one from a user's file."""

from __future__ import annotations

import difflib
import importlib.util
import os
from collections.abc import Callable, Mapping
from typing import Any

RewardFunction = Callable[[str, Mapping[str, Any]], float]
"""(decoded response, the prompt's row) -> score. The row holds the reference answer under "answer"."""

_REGISTERED: dict[str, RewardFunction] = {}


def register(name: str) -> Callable[[RewardFunction], RewardFunction]:
    """Decorator: make a reward function known as `reward.name = name`."""

    def add(function: RewardFunction) -> RewardFunction:
        assert name not in _REGISTERED, f"two reward functions are called '{name}'"
        _REGISTERED[name] = function
        return function

    return add


def load_reward(name: str) -> RewardFunction:
    """The reward function called `name`, or the one at `path/to/file.py:function`.

    Raises:
        ValueError: unknown name (the known ones are listed, nearest first), no such file or function, or a file that
            fails when it is imported.
    """
    path, sep, function_name = name.rpartition(":")
    if sep and path.endswith(".py"):
        return _load_from_file(path, function_name)
    if name not in _REGISTERED:
        near = difflib.get_close_matches(name, _REGISTERED, n=len(_REGISTERED), cutoff=0.4)
        known = near + sorted(_REGISTERED.keys() - set(near))
        raise ValueError(f"reward.name = '{name}' is not known; use {', '.join(known)}, or path/to/file.py:function")
    return _REGISTERED[name]


def _load_from_file(path: str, function_name: str) -> RewardFunction:
    if not os.path.isfile(path):
        raise ValueError(f"reward.name: no file at '{path}'")
    spec = importlib.util.spec_from_file_location("megarl_user_reward", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as e:  # a user's file can fail in any way
        raise ValueError(f"reward.name: importing '{path}' failed: {type(e).__name__}: {e}") from e
    function = getattr(module, function_name, None)
    if not callable(function):
        own = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise ValueError(f"reward.name: '{path}' has no function '{function_name}'; it has {', '.join(own) or 'none'}")
    return function
