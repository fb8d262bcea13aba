"""Calls reward functions: with their arguments, with lists, as coroutines. Torch-free."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from megarl.rewards import trl_signature
from megarl.rewards.arguments import NAMED
from megarl.rewards.registry import Reward, RewardFunction, parameters_of
from megarl.rewards.results import CallResult, NoScore, Response, result_of_value, shown
from megarl.rewards.verl_signature import MANY, arguments, list_arguments, names_of, numbers_of

OF_THE_RESPONSE = ("tokens", "finish_reason")
"""Parameters that a function is given if its signature names them."""


class Caller:
    """Calls one reward function with its configured arguments."""

    def __init__(self, reward: Reward, args: Mapping[str, Any]) -> None:
        self._function, self._args = reward.function, dict(args)
        parameters = parameters_of(reward.function)
        self._of_response = [name for name in OF_THE_RESPONSE if name in parameters]
        self._verl, self._parameters = names_of(parameters), parameters
        self._as_trl = trl_signature.is_trl(parameters)

    def one(self, response: Response, row: Mapping[str, Any]) -> Any:
        """Call the function for one response; an `async def` gives a coroutine. Raises NoScore for a wrong list."""
        if self._as_trl:
            values, logged = self._called_as_trl([response], [row])
            return _then(values, lambda given: trl_signature.value_of(_as_list(given, 1)[0], logged))
        of_response = {name: getattr(response, name) for name in self._of_response}
        if not self._verl:
            return self._function(response.text, row, **self._args, **of_response)
        return _then(self._function(**arguments(self._verl, response, row), **self._args, **of_response), numbers_of)

    def many(self, responses: Sequence[Response], rows: Sequence[Mapping[str, Any]]) -> list[CallResult]:
        """Call a function of lists; raises NoScore unless it returns a value for each response."""
        if self._as_trl:
            values, logged = self._called_as_trl(responses, rows)
            return [
                result_of_value(trl_signature.value_of(value, logged)) for value in _as_list(values, len(responses))
            ]
        of_response = {name: [getattr(response, name) for response in responses] for name in self._of_response}
        if self._verl:
            values = self._function(**list_arguments(self._verl, responses, rows), **self._args, **of_response)
        else:
            values = self._function([response.text for response in responses], list(rows), **self._args, **of_response)
        return [
            result_of_value(numbers_of(value) if self._verl else value) for value in _as_list(values, len(responses))
        ]

    def _called_as_trl(
        self, responses: Sequence[Response], rows: Sequence[Mapping[str, Any]]
    ) -> tuple[Any, dict[str, Any]]:
        """Call a function of TRL's signature; returns its values, and a mapping that it logs its metrics into."""
        logged: dict[str, Any] = {}
        given = trl_signature.arguments(self._parameters, responses, rows, logged.__setitem__)
        return self._function(**{**given, **self._args}), logged


def _as_list(values: Any, count: int) -> list[Any]:
    """Make a list of what a function of lists returned; raises NoScore unless there are `count` values."""
    if not isinstance(values, str | bytes | Mapping) and isinstance(values, Iterable):
        values = list(values)
    if not isinstance(values, list):
        raise NoScore(f"returned {shown(values)}, a {type(values).__name__}, for a list of responses")
    if len(values) != count:
        counts = [f"{n} {of}{'s' * (n != 1)}" for n, of in ((len(values), "score"), (count, "response"))]
        raise NoScore(f"returned {counts[0]} for a list of {counts[1]}, and not one for each")
    return values


def _then(value: Any, turn: Callable[[Any], Any]) -> Any:
    """Apply `turn` to a value; for an awaitable, return a coroutine that applies it to the result."""

    async def later() -> Any:
        return turn(await value)

    return later() if inspect.isawaitable(value) else turn(value)


def takes_lists(function: RewardFunction) -> bool | None:
    """Tell whether a function of verl's signature takes lists; None for any other function."""
    names = names_of(parameters_of(function))
    return names[0] == MANY[0] if names else None


def check_arguments(reward: Reward, args: Mapping[str, Any], key: str) -> None:
    """Raise ValueError, in one line, if the function cannot be called with these arguments.

    Args:
        key: the configuration key that they are values of, "reward.args".
    """
    parameters = parameters_of(reward.function)
    if not parameters:  # of an extension's function nothing is known
        return
    taken, as_verl, as_trl = list(parameters.values()), names_of(parameters), trl_signature.is_trl(parameters)
    positional = [p for p in taken if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if not (as_verl or as_trl) and len(positional) < 2 and not any(p.kind is p.VAR_POSITIONAL for p in taken):
        raise ValueError(f"reward {reward.name} takes ({', '.join(parameters)}) and not (response, row)")
    first = {"prompts", "completions"} if as_trl else set(as_verl) or {p.name for p in positional[:2]}
    free = {p.name: p for p in taken if p.kind in NAMED and p.name not in first}
    for name in args:
        if name in OF_THE_RESPONSE:
            raise ValueError(f"{key}: leave {name} out: each function that names it is given the response's own")
        if name not in free and (name in first or not any(p.kind is p.VAR_KEYWORD for p in taken)):
            known = [other for other in free if other not in OF_THE_RESPONSE]
            raise ValueError(f"{key}: {reward.name} takes no argument {name!r}; it takes {', '.join(known) or 'none'}")
    if as_trl:  # what else it needs are columns
        trl_signature.check_parameters(parameters, args, reward.name)
    given = {*(free if as_trl else args), *OF_THE_RESPONSE}
    missing = [name for name, p in free.items() if p.default is p.empty and name not in given]
    if missing:
        raise ValueError(f"{key}: {reward.name} needs {', '.join(missing)}")
    if reward.check_args is not None:
        try:
            reward.check_args(**args)
        except ValueError as e:
            raise ValueError(f"{key}: {e}") from e
