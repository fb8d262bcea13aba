"""Scores 1 for the reference answer, 0 for anything else."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megarl.rewards.registry import register
from megarl.rewards.rows import answer_of, check_answer


@register("exact_match", check_row=check_answer)
def exact_match(response: str, row: Mapping[str, Any]) -> float:
    """Compare the texts, blanks at both ends aside; `row` has a reference `answer`."""
    return float(response.strip() == answer_of(row))
