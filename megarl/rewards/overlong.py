"""Gives the soft penalty for overlong responses, as a reward of its own."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from megarl.algorithms.overlong import soft_overlong_penalty
from megarl.rewards.registry import register


def _check_args(*, max_response_length: int, buffer_len: int, penalty_factor: float) -> None:
    if not 1 <= buffer_len <= max_response_length:
        raise ValueError(f"buffer_len = {buffer_len} must be 1 to max_response_length = {max_response_length} tokens")
    if not 0 <= penalty_factor < math.inf:
        raise ValueError(f"penalty_factor = {penalty_factor} must be 0 or more")


@register("overlong", check_args=_check_args)
def overlong(
    response: str,
    row: Mapping[str, Any],
    *,
    tokens: int,
    max_response_length: int,
    buffer_len: int,
    penalty_factor: float = 1.0,
) -> float:
    """Penalise length, from 0 to -penalty_factor over the last `buffer_len` tokens (DAPO, arXiv 2503.14476, eq. 13).

    `reward.overlong_buffer` adds the same to the scores of any reward. The row is not read.

    Args:
        tokens: of the response, with its end token.
        max_response_length: tokens from which the whole penalty counts.
        buffer_len: tokens before that over which it grows.
        penalty_factor: the whole penalty.
    """
    return soft_overlong_penalty(
        tokens, max_response_length=max_response_length, buffer_len=buffer_len, penalty_factor=penalty_factor
    )
