"""Names of reward functions, and loading one from a user's file."""

from __future__ import annotations

import difflib
import importlib.util
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

RewardFunction = Callable[[str, Mapping[str, Any]], float]
"""(decoded response, the prompt's row) -> score. The row holds the reference answer under "answer"."""

RowCheck = Callable[[Mapping[str, Any]], None]
"""Raises ValueError for a row that the reward could not score a response to."""


@dataclass(frozen=True, kw_only=True)
class Reward:
    """A reward function under the name that the configuration gives it.

    Attributes:
        name: the value of `reward.name`.
        function: scores one response.
        check_row: what the function needs of a row; None: nothing that is known before it is called.
    """

    name: str
    function: RewardFunction
    check_row: RowCheck | None = None

    def __call__(self, response: str, row: Mapping[str, Any]) -> float:
        return self.function(response, row)


_REGISTERED: dict[str, Reward] = {}


def register(name: str, *, check_row: RowCheck | None = None) -> Callable[[RewardFunction], RewardFunction]:
    """Decorator: make a reward function known as `reward.name = name`."""

    def add(function: RewardFunction) -> RewardFunction:
        assert name not in _REGISTERED, f"two reward functions are called '{name}'"
        _REGISTERED[name] = Reward(name=name, function=function, check_row=check_row)
        return function

    return add


def load_reward(name: str) -> Reward:
    """The reward called `name`, or the function at `path/to/file.py:function`.

    Raises:
        ValueError: unknown name (the known ones are listed, nearest first), no such file or function, or a file that
            fails when it is imported.
    """
    path, sep, function_name = name.rpartition(":")
    if sep and path.endswith(".py"):
        return Reward(name=name, function=_load_from_file(path, function_name))
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
    except (Exception, SystemExit) as e:  # a user's file can fail in any way
        reason = " ".join(f"{type(e).__name__}: {e}".split())
        raise ValueError(f"reward.name: importing '{path}' failed: {reason}") from e
    function = getattr(module, function_name, None)
    if not callable(function):
        own = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise ValueError(f"reward.name: '{path}' has no function '{function_name}'; it has {', '.join(own) or 'none'}")
    return function
