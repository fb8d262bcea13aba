"""1 for a mathematical answer that equals the reference, as the library math-verify reads both."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from megarl.evaluation.answers import last_boxed
from megarl.rewards.math_process import same_value
from megarl.rewards.registry import register
from megarl.rewards.rows import check_answer


def _check_args(*, boxed_only: bool, timeout: float) -> None:
    import importlib.util

    if not 0 < timeout < math.inf:
        raise ValueError(f"timeout = {timeout!r} must be seconds, more than 0")
    if importlib.util.find_spec("math_verify") is None:
        raise ValueError("needs the package math-verify: pip install math-verify[antlr4_13_2]")


def _prepare() -> None:
    same_value("1", "$1$", timeout=60)  # the process that compares takes a second to start


@register("math_verify", check_row=check_answer, check_args=_check_args, prepare=_prepare)
def math_verify(response: str, row: Mapping[str, Any], *, boxed_only: bool = False, timeout: float = 5.0) -> float:
    """Compare values: fractions, decimals, sets, intervals, equations, units; `row` has a reference `answer`.

    The last `\\boxed{...}` of the response counts, with the braces in it; without one, the last value of the text. A
    response that takes the library longer than `timeout`, or more than 4 GiB, scores 0: 9^{9^{9}} does.

    Args:
        boxed_only: a response without `\\boxed` scores 0.
        timeout: seconds for one comparison.

    Raises:
        ValueError: the row's answer holds nothing mathematical.
    """
    answer = str(row["answer"]).strip()
    boxed = last_boxed(response)
    if boxed is None and boxed_only:
        return 0.0
    reference = last_boxed(answer)
    found = (response if boxed is None else boxed).strip()
    if not found:
        return 0.0
    if found == (answer if reference is None else reference).strip():
        return 1.0
    return float(bool(same_value(answer, found if boxed is None else f"$\\boxed{{{boxed}}}$", timeout=timeout)))
