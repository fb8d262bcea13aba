"""Computes the soft penalty for responses that come near their greatest length. Torch-free."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megarl.config import Config
    from megarl.types import Rollouts


def soft_overlong_penalty(length: int, *, max_response_length: int, buffer_len: int, penalty_factor: float) -> float:
    """Return what is added to the score of a long response (DAPO, arXiv 2503.14476, eq. 13); 0 to -penalty_factor.

    With max_response_length=100, buffer_len=20 and penalty_factor=1: 0 up to 80 tokens, -0.25 at 85, -1 from 100 on.

    Args:
        length: tokens of the response.
        buffer_len: tokens before `max_response_length` over which the penalty grows; 1 or more.
        penalty_factor: the penalty at `max_response_length`.
    """
    assert buffer_len > 0
    left = max_response_length - buffer_len - length
    return penalty_factor * min(max(left / buffer_len, -1.0), 0.0)


def overlong_penalties(rollouts: Rollouts, config: Config) -> list[float]:
    """Return each rollout's `soft_overlong_penalty` as `reward.overlong_buffer` says; 0 where it is off.

    All parts of a response have the penalty of the longest one.
    """
    buffer = config.reward.overlong_buffer
    penalties = [0.0] * len(rollouts)
    for places in rollouts.episodes if buffer.enable else []:
        penalty = soft_overlong_penalty(
            max(len(rollouts[i].response) for i in places),
            max_response_length=config.data.max_response_length,
            buffer_len=buffer.len,
            penalty_factor=buffer.penalty_factor,
        )
        for i in places:
            penalties[i] = penalty
    return penalties
