"""1 for the reference answer, 0 for anything else."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megarl.rewards.registry import register


def _check_row(row: Mapping[str, Any]) -> None:
    if "answer" not in row:
        raise ValueError(f"needs an answer: set data.answer_key to one of {', '.join(row)}")
    if row["answer"] is None:
        raise ValueError("needs an answer, and the row's is null")


@register("exact_match", check_row=_check_row)
def exact_match(response: str, row: Mapping[str, Any]) -> float:
    """Compare the texts, blanks at both ends aside; `row` has a reference `answer`."""
    return float(response.strip() == str(row["answer"]).strip())
