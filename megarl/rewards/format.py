"""1 for a response of the wanted form, 0 for any other."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from megarl.rewards.arguments import compiled
from megarl.rewards.registry import register

THINK_ANSWER = r"\s*<think>(?:(?!</?think>).)*</think>\s*<answer>(?:(?!</?answer>).)*</answer>\s*"
"""One thought, then one answer, and nothing else."""


def _check_args(*, pattern: str) -> None:
    compiled(pattern, "pattern", flags=re.DOTALL)


@register("format", check_args=_check_args)
def format(response: str, row: Mapping[str, Any], *, pattern: str = THINK_ANSWER) -> float:
    """Match the whole response against a pattern; the row is not read.

    Args:
        pattern: a regular expression of Python in which "." matches line ends too; default one <think>...</think> and
            one <answer>...</answer>.
    """
    return float(re.fullmatch(pattern, response, re.DOTALL) is not None)
