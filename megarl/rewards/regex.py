"""Scores 1 if what a regular expression takes out of the response is the reference answer."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import regex as engine

from megarl.rewards.arguments import check_pattern, check_timeout
from megarl.rewards.registry import register
from megarl.rewards.rows import answer_of, check_answer


def _check_args(*, pattern: str, compare: bool, timeout: float) -> None:
    check_pattern(pattern, "pattern", groups=1 if compare else None)
    check_timeout(timeout)


def _check_row(row: Mapping[str, Any], *, compare: bool) -> None:
    if compare:
        check_answer(row)


@register("regex", check_row=_check_row, check_args=_check_args)
def regex(response: str, row: Mapping[str, Any], *, pattern: str, compare: bool = True, timeout: float = 5.0) -> float:
    """Compare what the group of a pattern's last match holds with the answer, blanks at both ends aside.

    Args:
        pattern: a regular expression of the package regex, Python's with additions, with one group,
            "<answer>(.*?)</answer>"; "(?s)" in front lets "." match line ends.
        compare: false: 1 for any match, and the row needs no `answer`.
        timeout: seconds; a response that takes longer scores 0, as 20,000 times "<answer>" without an end may.
    """
    deadline = time.monotonic() + timeout
    last: engine.Match[str] | None = None
    try:
        for match in engine.finditer(pattern, response, timeout=timeout):
            last = match
            if time.monotonic() > deadline:
                return 0.0
    except TimeoutError:
        return 0.0
    if last is None or not compare:
        return float(last is not None)
    return float((last[1] or "").strip() == answer_of(row))
