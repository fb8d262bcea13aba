"""What most rewards need of a row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def check_answer(row: Mapping[str, Any]) -> None:
    """Raises ValueError for a row without a reference answer."""
    if "answer" not in row:
        raise ValueError(f"needs an answer: set data.answer_key to one of {', '.join(row)}")
    if row["answer"] is None:
        raise ValueError("needs an answer, and the row's is null")
