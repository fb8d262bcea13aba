"""Scores 1 for a response of the wanted form, 0 for any other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import regex

from megarl.rewards.arguments import check_pattern, check_timeout
from megarl.rewards.registry import register

THINK_ANSWER = r"\s*<think>(?:(?!</?think>).)*</think>\s*<answer>(?:(?!</?answer>).)*</answer>\s*"
"""One thought, then one answer, and nothing else."""


def _check_args(*, pattern: str, timeout: float) -> None:
    check_pattern(pattern, "pattern")
    check_timeout(timeout)


@register("format", check_args=_check_args)
def format(response: str, row: Mapping[str, Any], *, pattern: str = THINK_ANSWER, timeout: float = 5.0) -> float:
    """Match the whole response against a pattern; the row is not read.

    Args:
        pattern: a regular expression of the package regex, Python's with additions, in which "." matches line ends too;
            default one <think>...</think> and one <answer>...</answer>.
        timeout: seconds; a response that takes longer scores 0.
    """
    try:
        return float(regex.fullmatch(pattern, response, regex.DOTALL, timeout=timeout) is not None)
    except TimeoutError:
        return 0.0
