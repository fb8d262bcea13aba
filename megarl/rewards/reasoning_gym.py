"""Score by the verifier of the reasoning-gym task that a row was generated from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from megarl.rewards.registry import register


@register("reasoning_gym")
def reasoning_gym_score(response: str, row: Mapping[str, Any]) -> float:
    """The task's own score of the response, 0 to 1.

    Args:
        row: `data_source` (the task's name), `question`, `answer` and `metadata`, as
            `tools/prepare_reasoning_gym.py` writes them.

    Raises:
        ValueError: a column is missing, or reasoning-gym has no task of that name.
    """
    missing = [key for key in ("data_source", "question", "answer", "metadata") if key not in row]
    if missing:
        raise ValueError(f"reward reasoning_gym needs the columns {', '.join(missing)}; the row has {', '.join(row)}")
    entry = {key: row[key] for key in ("question", "answer", "metadata")}
    return float(_verifier(row["data_source"])(response.strip(), entry))


@cache
def _verifier(task: str) -> Callable[[str, dict[str, Any]], float]:
    import reasoning_gym  # imports a hundred task generators

    try:
        return reasoning_gym.get_score_answer_fn(task)
    except ValueError as e:
        raise ValueError(f"data_source = '{task}' is no reasoning-gym task") from e
