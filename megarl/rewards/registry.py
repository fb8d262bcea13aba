"""Finds reward functions by the name that the configuration gives them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from megarl.registry import Registry
from megarl.rewards import trl_signature
from megarl.rewards.arguments import check_types

RewardFunction = Callable[..., Any]
"""(decoded response, the prompt's row) -> score: a number, or a mapping with "score" and further numbers.

The row holds the reference answer under "answer". Further parameters are the configuration's `reward.args`, and, if
they are called so, `tokens` (of the response) and `finish_reason` ("stop" or "length"). It may be an `async def`; with
`reward.batch_size` it is handed lists and returns one. Functions of verl and TRL are called as these call them:
`verl_signature`, `trl_signature`.
"""

ArgsCheck = Callable[..., None]
"""Raises ValueError for keyword arguments that the reward does not work with; it is given all, with their defaults."""

RowCheck = Callable[..., None]
"""(row, **arguments): raises ValueError for a row that the reward could not score a response to.

It is given those of the reward's arguments that it names.
"""


@dataclass(frozen=True, kw_only=True)
class Reward:
    """Holds a reward function under the name that the configuration gives it.

    Attributes:
        name: the value of `reward.name`.
        function: scores one response.
        check_row: what the function needs of a row; None: nothing that is known before it is called.
        check_args: what the values of its arguments must be, beyond their types; None: anything.
        prepare: what takes long before the first call, such as imports; a worker does it when it starts.
        named: whether another process finds the function under its name; a closure that a program gave is called where
            it is.
    """

    name: str
    function: RewardFunction
    check_row: RowCheck | None = None
    check_args: ArgsCheck | None = None
    prepare: Callable[[], object] | None = None
    named: bool = False

    def __call__(self, response: str, row: Mapping[str, Any], **arguments: Any) -> Any:
        return self.function(response, row, **arguments)


_FUNCTIONS: Registry[RewardFunction] = Registry("reward.name", "function", awaits=True)
_CHECKS: dict[str, dict[str, Any]] = {}


def register(
    name: str,
    *,
    check_row: RowCheck | None = None,
    check_args: ArgsCheck | None = None,
    prepare: Callable[[], object] | None = None,
) -> Callable[[RewardFunction], RewardFunction]:
    """Make a reward function known as `reward.name = name`, as its decorator; the other arguments are `Reward`'s."""
    _CHECKS[name] = {"check_row": check_row, "check_args": check_args, "prepare": prepare}
    return _FUNCTIONS.register(name)


def _defaults(function: RewardFunction) -> dict[str, Any]:
    """Return the defaults of the arguments that a configuration may leave out."""
    named = inspect.signature(function).parameters.values()
    return {p.name: p.default for p in named if p.kind is p.KEYWORD_ONLY and p.default is not p.empty}


def parameters_of(function: RewardFunction) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of a function's signature; empty for an extension's function, of which nothing is known."""
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):
        return {}


def is_registered(name: str) -> bool:
    """Tell whether a reward function comes with MegaRL."""
    return name in _FUNCTIONS.names()


def load_reward(name: str) -> Reward:
    """Load the reward called `name`, or the one at `path/to/file.py:function`; raises ValueError as `Registry.load`."""
    function, known = _FUNCTIONS.load(name), _CHECKS.get(name, {})
    check_values: ArgsCheck | None = known.get("check_args")
    check_columns: RowCheck | None = known.get("check_row")

    def check_args(**args: Any) -> None:
        check_types(function, args)
        if check_values is not None:
            check_values(**{**_defaults(function), **args})

    def check_row(row: Mapping[str, Any], **args: Any) -> None:
        assert check_columns is not None
        taken = inspect.signature(check_columns).parameters
        given = {**_defaults(function), **args}
        check_columns(row, **{key: value for key, value in given.items() if key in taken})

    if trl_signature.is_trl(parameters := parameters_of(function)):
        known = {"check_row": lambda row, **args: trl_signature.check_row(row, parameters, args)}
    elif known:
        known = {**known, "check_args": check_args, "check_row": check_row if check_columns is not None else None}
    return Reward(name=name, function=function, named=True, **known)


def names() -> list[str]:
    """Return the names of the rewards that come with MegaRL, sorted."""
    return _FUNCTIONS.names()
