"""How a reward function is called: its arguments, its lists, its coroutines. Torch-free."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from typing import Any

from megarl.rewards.judge import Judged, NoScore, Response, judged_value, shown
from megarl.rewards.registry import Reward, RewardFunction
from megarl.rewards.verl_signature import MANY, arguments, asked_of, list_arguments, numbers_of

OF_THE_RESPONSE = ("tokens", "finish_reason")
"""Parameters that a function is given if its signature names them."""

_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


class Caller:
    """Calls one reward function with its configured arguments."""

    def __init__(self, reward: Reward, args: Mapping[str, Any]) -> None:
        self._function, self._args = reward.function, dict(args)
        parameters = _parameters(reward.function)
        self._of_response = [name for name in OF_THE_RESPONSE if name in parameters]
        self._verl = asked_of(parameters)

    def one(self, response: Response, row: Mapping[str, Any]) -> Any:
        """What the function returns; of an `async def` a coroutine."""
        own = {name: getattr(response, name) for name in self._of_response}
        if not self._verl:
            return self._function(response.text, row, **self._args, **own)
        value = self._function(**arguments(self._verl, response, row), **self._args, **own)
        return _numbers(value) if inspect.isawaitable(value) else numbers_of(value)

    def many(self, responses: Sequence[Response], rows: Sequence[Mapping[str, Any]]) -> list[Judged]:
        """What a function of lists returns for each of them; raises NoScore unless that is as many values."""
        own = {name: [getattr(response, name) for response in responses] for name in self._of_response}
        if self._verl:
            values = self._function(**list_arguments(self._verl, responses, rows), **self._args, **own)
        else:
            values = self._function([response.text for response in responses], list(rows), **self._args, **own)
        if not isinstance(values, str | bytes | Mapping) and isinstance(values, Iterable):
            values = list(values)
        if not isinstance(values, list):
            raise NoScore(f"returned {shown(values)}, a {type(values).__name__}, for a list of responses")
        if len(values) != len(responses):
            counts = [f"{n} {of}{'s' * (n != 1)}" for n, of in ((len(values), "score"), (len(responses), "response"))]
            raise NoScore(f"returned {counts[0]} for a list of {counts[1]}, and not one for each")
        return [judged_value(numbers_of(value) if self._verl else value) for value in values]


async def _numbers(value: Awaitable[Any]) -> Any:
    return numbers_of(await value)


def is_async(function: RewardFunction) -> bool:
    """Whether it is an `async def`, or an object whose `__call__` is one."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


def takes_lists(function: RewardFunction) -> bool | None:
    """Whether a function that is called as verl calls them takes lists; None for any other function."""
    asked = asked_of(_parameters(function))
    return asked[0] == MANY[0] if asked else None


def check_arguments(reward: Reward, args: Mapping[str, Any], key: str) -> None:
    """Raises ValueError, in one line, if the function cannot be called with these arguments.

    Args:
        key: the configuration key that they are values of, "reward.args".
    """
    parameters = _parameters(reward.function)
    if not parameters:  # of an extension's function nothing is known
        return
    taken, as_verl = list(parameters.values()), asked_of(parameters)
    positional = [p for p in taken if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if not as_verl and len(positional) < 2 and not any(p.kind is p.VAR_POSITIONAL for p in taken):
        raise ValueError(f"reward {reward.name} takes ({', '.join(parameters)}) and not (response, row)")
    first = set(as_verl) or {p.name for p in positional[:2]}
    free = {p.name: p for p in taken if p.kind in _NAMED and p.name not in first}
    for name in args:
        if name in OF_THE_RESPONSE:
            raise ValueError(f"{key}: {name} is the response's own, and is given to every function that names it")
        if name not in free and (name in first or not any(p.kind is p.VAR_KEYWORD for p in taken)):
            known = [other for other in free if other not in OF_THE_RESPONSE]
            raise ValueError(f"{key}: {reward.name} takes no argument {name!r}; it takes {', '.join(known) or 'none'}")
    given = {*args, *OF_THE_RESPONSE}
    missing = [name for name, p in free.items() if p.default is p.empty and name not in given]
    if missing:
        raise ValueError(f"{key}: {reward.name} needs {', '.join(missing)}")
    if reward.check_args is not None:
        try:
            reward.check_args(**args)
        except ValueError as e:
            raise ValueError(f"{key}: {e}") from e


def _parameters(function: RewardFunction) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):
        return {}
