"""Calls reward functions as TRL's GRPOTrainer calls them: lists by name, (prompts, completions, columns ...).

Such a function is known by its parameter `completions`. It is given the columns that it names, or with `**kwargs` all;
`log_metric` and `log_extra` as TRL has them. To a prompt of messages a completion is a list of one message, else text.
Torch-free.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from megarl.rewards.arguments import NAMED
from megarl.rewards.results import NOT_APPLICABLE, Response, number

Parameters = Mapping[str, inspect.Parameter]

_OF_TRL = ("prompts", "completions", "log_metric", "log_extra")
_NOT_HERE = ("completion_ids", "trainer_state", "environments")
_NO_COLUMNS = ("prompt", "completion", *_NOT_HERE)  # that TRL hands on


def is_trl(parameters: Parameters) -> bool:
    """Tell whether a function with these parameters is called as TRL calls them."""
    return "completions" in parameters


def arguments(
    parameters: Parameters,
    responses: Sequence[Response],
    rows: Sequence[Mapping[str, Any]],
    log_metric: Callable[[str, Any], None],
) -> dict[str, Any]:
    """Return the arguments for some responses, beside the configured ones."""
    keys = [key for key in rows[0] if key not in _NO_COLUMNS and all(key in row for row in rows)]
    given: dict[str, Any] = {key: [row[key] for row in rows] for key in keys}
    given |= {
        "prompts": [response.prompt for response in responses],
        "completions": [_completion(response) for response in responses],
        "log_metric": log_metric,
        "log_extra": lambda column, values: None,
    }
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    return {name: value for name, value in given.items() if takes_any or name in parameters}


def value_of(value: Any, logged: Mapping[str, Any]) -> Any:
    """Join a value that the function returned for a response with the metrics that it logged in the same call."""
    if value is None:
        return NOT_APPLICABLE
    return {**logged, "score": number(value)} if logged else value


def check_parameters(parameters: Parameters, args: Mapping[str, Any], name: str) -> None:
    """Raise ValueError for a parameter without a default whose value TRL hands on and MegaRL does not."""
    for parameter in needed(parameters, args):
        if parameter in _NOT_HERE:
            raise ValueError(f"reward {name} takes TRL's {parameter}, which is not handed on; give it a default")


def needed(parameters: Parameters, args: Mapping[str, Any]) -> list[str]:
    """List the parameters that only columns can be given for."""
    return [
        name
        for name, p in parameters.items()
        if p.kind in NAMED and p.default is p.empty and name not in (*_OF_TRL, *args)
    ]


def check_row(row: Mapping[str, Any], parameters: Parameters, args: Mapping[str, Any]) -> None:
    """Raise ValueError for a row without a column that the function names."""
    missing = [name for name in needed(parameters, args) if name not in row or name in _NO_COLUMNS]
    if missing:
        raise ValueError(
            f"is called as TRL does it, for its parameter completions, and takes {', '.join(missing)}: no such column; "
            f"the row has {', '.join(row)}"
        )


def _completion(response: Response) -> Any:
    return [{"role": "assistant", "content": response.text}] if isinstance(response.prompt, list) else response.text
