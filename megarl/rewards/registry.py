"""Reward functions by the name that the configuration gives them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from megarl.registry import Registry

BY_MODEL = "model"
"""The value of `reward.name` that leaves scoring to a reward model."""

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


_FUNCTIONS: Registry[RewardFunction] = Registry("reward.name", "function")
_ROW_CHECKS: dict[str, RowCheck | None] = {}


def register(name: str, *, check_row: RowCheck | None = None) -> Callable[[RewardFunction], RewardFunction]:
    """Decorator: make a reward function known as `reward.name = name`."""
    _ROW_CHECKS[name] = check_row
    return _FUNCTIONS.register(name)


def load_reward(name: str) -> Reward:
    """The reward called `name`, or the function at `path/to/file.py:function`; raises ValueError as `Registry.load`."""
    return Reward(name=name, function=_FUNCTIONS.load(name), check_row=_ROW_CHECKS.get(name))
