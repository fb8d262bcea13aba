"""1 for the reference answer, 0 for anything else."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megarl.rewards.registry import register


@register("exact_match")
def exact_match(response: str, row: Mapping[str, Any]) -> float:
    """Compare the texts, blanks at both ends aside.

    Raises:
        ValueError: the row has no answer.
    """
    if "answer" not in row:
        raise ValueError(f"exact_match needs an answer: set data.answer_key to one of {', '.join(row)}")
    return float(response.strip() == str(row["answer"]).strip())
