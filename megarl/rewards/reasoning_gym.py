"""Score by the verifier of the reasoning-gym task that a row was generated from."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, cast

from megarl.rewards.reasoning_gym_json import decode
from megarl.rewards.registry import register

Verifier = Callable[[str, dict[str, Any]], float]
"""(response, entry) -> score."""

COLUMNS = ("data_source", "question", "answer", "metadata")


def _check_row(row: Mapping[str, Any]) -> None:
    missing = [key for key in COLUMNS if key not in row]
    if missing:
        raise ValueError(f"needs the columns {', '.join(missing)}; the row has {', '.join(row)}")
    if not isinstance(row["data_source"], str):
        raise ValueError(f"needs a task's name in column 'data_source', not {type(row['data_source']).__name__}")
    verifier_of(row["data_source"])
    if not isinstance(decode(row["metadata"]), dict):
        raise ValueError(f"needs an object in column 'metadata', not {type(row['metadata']).__name__}")
    if not isinstance(row["question"], str):
        raise ValueError(f"needs text in column 'question', not {type(row['question']).__name__}")


@register("reasoning_gym", check_row=_check_row, prepare=lambda: importlib.import_module("reasoning_gym"))
def reasoning_gym_score(response: str, row: Mapping[str, Any]) -> float:
    """The task's own score of the response, 0 to 1.

    Some verifiers raise on a response of another form than an answer's ("abc" where a number belongs). Such a response
    scores 0 if the verifier accepts the row's own answer; if not, it is the row that is wrong.

    Args:
        row: `data_source` (the task's name), `question`, `answer` and `metadata`, as
            `tools/prepare_reasoning_gym.py` writes them.

    Raises:
        ValueError: the verifier raises on the response, and on the row's own answer or gives it no score.
    """
    verifier = verifier_of(row["data_source"])

    def entry() -> dict[str, Any]:  # anew for every call: verifiers change what they are given
        return {"question": row["question"], "answer": decode(row["answer"]), "metadata": decode(row["metadata"])}

    try:
        return float(verifier(response.strip(), entry()))
    except Exception as e:
        if not _accepts(verifier, entry):
            raise ValueError(
                f"the verifier of {row['data_source']} does not accept the row's own answer: the row is not what "
                "tools/prepare_reasoning_gym.py wrote"
            ) from e
        return 0.0


def _accepts(verifier: Verifier, entry: Callable[[], dict[str, Any]]) -> bool:
    answer = entry()["answer"]
    if answer is None:  # a task with many right answers names none
        return True
    try:
        return verifier(answer, entry()) > 0
    except Exception:
        return False


@cache
def verifier_of(task: str) -> Verifier:
    """The score function of a task; raises ValueError if reasoning-gym has none of that name.

    It is kept: to make one, arc_agi and others read all their data.
    """
    import reasoning_gym  # imports a hundred task generators

    try:
        return cast(Verifier, reasoning_gym.get_score_answer_fn(task))
    except ValueError as e:
        raise ValueError(f"finds no task of reasoning-gym called {task!r} (data_source)") from e
