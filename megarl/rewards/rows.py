"""Reads what most rewards need of the columns of a row."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping
from typing import Any

_ANSWERS = ("answer", "ground_truth", "solution", "completion", "target")


def column_names(columns: Mapping[str, Any]) -> list[str]:
    """Return names for configuration keys: "prompt", or "reward_model.ground_truth" for a field of a column."""
    names: list[str] = []
    for column, value in columns.items():
        inner = value if isinstance(value, Mapping) else {}
        names += [f"{column}.{field}" for field in inner] or [str(column)]
    return names


def answer_hint(columns: Mapping[str, Any]) -> str:
    """Say what to set `data.answer_key` to, behind a refusal; empty if no column is called as answers mostly are."""
    names = [name for name in column_names(columns) if name.rpartition(".")[2] in _ANSWERS]
    return f"; there is '{names[0]}': set data.answer_key={names[0]}" if names else ""


def check_answer(row: Mapping[str, Any]) -> None:
    """Raise ValueError for a row without a reference answer that a response could give."""
    if "answer" not in row:
        hint = answer_hint(row) or f"; set data.answer_key to one of {', '.join(column_names(row))}"
        raise ValueError(f"needs an answer{hint}")
    if row["answer"] is None:
        raise ValueError("needs an answer, and the row's is null")
    answer_of(row)


def answer_of(row: Mapping[str, Any]) -> str:
    """Return the reference answer as text: 7.0, what a table makes of a column of whole numbers with a gap, as "7".

    Raises:
        ValueError: it is blank, or neither text nor a number.
    """
    answer = row["answer"]
    if isinstance(answer, bytes):
        try:
            answer = answer.decode()
        except UnicodeDecodeError as e:
            raise ValueError(f"needs text as the answer, not {answer!r:.80}") from e
    if isinstance(answer, numbers.Real) and not isinstance(answer, numbers.Integral | bool):
        if not math.isfinite(answer):
            raise ValueError(f"needs an answer, and the row's is {answer}")
        answer = int(float(answer)) if float(answer).is_integer() else answer
    if not isinstance(answer, str | numbers.Number):
        raise ValueError(f"needs text or a number as the answer, not {type(answer).__name__}")
    text = str(answer).strip()
    if not text:
        raise ValueError("needs an answer, and the row's is blank")
    return text
