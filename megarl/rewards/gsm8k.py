"""Scores the number after "####": 1 if it is the reference's."""

from __future__ import annotations

import re
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from megarl.rewards.registry import register
from megarl.rewards.rows import answer_of, check_answer

# no two runs of blanks side by side: of thousands of blanks, each way to share them out would be tried
_MARKED = re.compile(
    r"####[ \t]*(?:\\?[$\u20ac\u00a3][ \t]*)?"
    r"((?:[-+][ \t]*)?\$?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+|(?<=\d)\.?))([^\n]*)",
    re.ASCII,
)
_DRESSED = re.compile(r"(####[ \t]*)(?:\*\*([^*\n]{1,500})\*\*|\\boxed\{([^{}\n]{1,500})\})")
# a second number, an operation or a scale: "18 or 19", "18/2", "18 million", "18 and a half"
_SCALES = r"(?:hundred|thousand|(?:m|b|tr)illion|ten|half|third|quarter|dozen)(?:th)?s?|halves"
_MORE = re.compile(
    rf"[\d\u00bc-\u00be]|^\s*[=*/^+\-]|^[\w,]|\b(?:{_SCALES}|k|mn|bn|squared|cubed|plus|minus|times|divided)\b",
    re.IGNORECASE,
)
_DIGITS = 400  # of a number; int and Decimal take long for millions


def _check_row(row: Mapping[str, Any]) -> None:
    check_answer(row)
    if _number_of(answer_of(row)) is None:
        raise ValueError(f"needs a number as the answer, or a solution with '#### number', not {row['answer']!r:.80}")


@register("gsm8k", check_row=_check_row)
def gsm8k(response: str, row: Mapping[str, Any]) -> float:
    """Compare the number after the last "####" as a number: "#### 1,200.0" is 1200, and "$" counts for nothing.

    A line with a second number or an operation, "#### 18 or 19", "#### 36/2", gives no answer.

    `row` has a reference `answer`: a number, or GSM8K's solution with "#### number" at its end.
    """
    answer, reference = _marked(response), _number_of(answer_of(row))
    return float(answer is not None and answer == reference)


def _number_of(text: str) -> Decimal | None:
    return _marked(text if "####" in text else f"#### {text}")


def _marked(text: str) -> Decimal | None:
    """Read the number after the last mark; None if another thing or nothing is there."""
    start = text.rfind("####")
    text = _DRESSED.sub(r"\1\2\3", text[start:].replace("\u2212", "-")) if start >= 0 else ""
    match = _MARKED.match(text)
    if match is None or len(match[1]) > _DIGITS or _MORE.search(match[2]):
        return None
    return Decimal(re.sub(r"[\s$,]", "", match[1]))
