"""Scores 1 for a response of the wanted length, less the further from it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megarl.rewards.registry import register


def _check_args(*, target: int, width: int, shorter_is_fine: bool) -> None:
    for name, value, least in (("target", target, 0), ("width", width, 1)):
        if value < least:
            raise ValueError(f"{name} = {value} must be tokens, {least} or more")


@register("length", check_args=_check_args)
def length(
    response: str, row: Mapping[str, Any], *, tokens: int, target: int, width: int, shorter_is_fine: bool = True
) -> float:
    """Score 1 at the target length, falling linearly to 0 at `width` tokens from it; the row is not read.

    With target=100 and width=50: 1 up to 100 tokens, 0.5 at 125, 0 from 150 on.

    Args:
        tokens: of the response, with its end token.
        target: tokens.
        width: tokens from there to 0.
        shorter_is_fine: a response below the target scores 1; false: it falls there as well.
    """
    distance = tokens - target if shorter_is_fine else abs(tokens - target)
    return max(0.0, 1.0 - max(distance, 0) / width)
