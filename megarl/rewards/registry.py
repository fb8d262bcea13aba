"""Reward functions by the name that the configuration gives them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from megarl.registry import Registry
from megarl.rewards.arguments import check_types

BY_MODEL = "model"
"""The value of `reward.name` that leaves scoring to a reward model."""

RewardFunction = Callable[..., Any]
"""(decoded response, the prompt's row, **arguments) -> score. The row holds the reference answer under "answer".

The arguments are the function's own, by keyword. A score is a number, or a mapping with "score" and further numbers.
"""

ArgsCheck = Callable[..., None]
"""Raises ValueError for keyword arguments that the reward does not work with."""

RowCheck = Callable[[Mapping[str, Any]], None]
"""Raises ValueError for a row that the reward could not score a response to."""


@dataclass(frozen=True, kw_only=True)
class Reward:
    """A reward function under the name that the configuration gives it.

    Attributes:
        name: the value of `reward.name`.
        function: scores one response.
        check_row: what the function needs of a row; None: nothing that is known before it is called.
        check_args: what the values of its arguments must be, beyond their types; None: anything.
    """

    name: str
    function: RewardFunction
    check_row: RowCheck | None = None
    check_args: ArgsCheck | None = None

    def __call__(self, response: str, row: Mapping[str, Any], **arguments: Any) -> Any:
        return self.function(response, row, **arguments)


_FUNCTIONS: Registry[RewardFunction] = Registry("reward.name", "function")
_ROW_CHECKS: dict[str, RowCheck | None] = {}
_ARGS_CHECKS: dict[str, ArgsCheck | None] = {}


def register(
    name: str, *, check_row: RowCheck | None = None, check_args: ArgsCheck | None = None
) -> Callable[[RewardFunction], RewardFunction]:
    """Decorator: make a reward function known as `reward.name = name`; the others as `Reward` has them."""
    _ROW_CHECKS[name], _ARGS_CHECKS[name] = check_row, check_args
    return _FUNCTIONS.register(name)


def load_reward(name: str) -> Reward:
    """The reward called `name`, or the function at `path/to/file.py:function`; raises ValueError as `Registry.load`."""
    function, own_check = _FUNCTIONS.load(name), _ARGS_CHECKS.get(name)

    def check_args(**args: Any) -> None:
        check_types(function, args)
        if own_check is not None:
            own_check(**args)

    return Reward(
        name=name,
        function=function,
        check_row=_ROW_CHECKS.get(name),
        check_args=check_args if name in _ARGS_CHECKS else None,
    )


def names() -> list[str]:
    """Of the rewards that come with MegaRL, sorted."""
    return _FUNCTIONS.names()
