"""Calls reward functions as verl calls them: (data_source, solution_str, ground_truth, extra_info).

Such a function is known by its parameters' names. The row's columns are verl's: `data_source`, `extra_info`, and
`reward_model.ground_truth`, which `data.answer_key` names. Torch-free.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megarl.rewards.results import Response

ONE = ("data_source", "solution_str", "ground_truth", "extra_info")
MANY = ("data_sources", "solution_strs", "ground_truths", "extra_infos")
"""Names of a function of lists, for `reward.batch_size`."""


def names_of(parameters: Mapping[str, Any]) -> tuple[str, ...]:
    """Return which of verl's names a function takes; empty for a function that is not called as verl calls them."""
    for names in (ONE, MANY):
        if set(names[:3]) <= set(parameters):
            return tuple(name for name in names if name in parameters)
    return ()


def arguments(names: Sequence[str], response: Response, row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments for one response."""
    values = (row.get("data_source", ""), response.text, _ground_truth(row), row.get("extra_info"))
    return {name: value for name, value in zip(ONE, values, strict=True) if name in names}


def list_arguments(
    names: Sequence[str], responses: Sequence[Response], rows: Sequence[Mapping[str, Any]]
) -> dict[str, list[Any]]:
    """Return the arguments for several responses, as lists."""
    pairs = list(zip(responses, rows, strict=True))
    single = [arguments(ONE, response, row) for response, row in pairs]
    return {many: [values[name] for values in single] for name, many in zip(ONE, MANY, strict=True) if many in names}


def numbers_of(value: Any) -> Any:
    """Leave out the texts beside the score that verl's function may return for its records."""
    if not isinstance(value, Mapping):
        return value
    return {name: item for name, item in value.items() if name == "score" or not isinstance(item, str | None)}


def _ground_truth(row: Mapping[str, Any]) -> Any:
    if "answer" in row:
        return row["answer"]
    of_model = row.get("reward_model")
    return of_model.get("ground_truth") if isinstance(of_model, Mapping) else None
