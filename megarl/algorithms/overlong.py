"""The soft penalty for responses that come near their greatest length."""

from __future__ import annotations

from torch import Tensor


def soft_overlong_penalty(
    lengths: Tensor, *, max_response_length: int, buffer_len: int, penalty_factor: float
) -> Tensor:
    """What is added to the scores of long responses (DAPO, arXiv 2503.14476, eq. 13).

    With max_response_length=100, buffer_len=20 and penalty_factor=1: 0 up to 80 tokens, -0.25 at 85, -1 from 100 on.

    Args:
        lengths: int64 [N], tokens of each response.
        buffer_len: tokens before `max_response_length` over which the penalty grows; 1 or more.
        penalty_factor: the penalty at `max_response_length`.

    Returns:
        float32 [N], from 0 to -penalty_factor.
    """
    assert buffer_len > 0
    left = max_response_length - buffer_len - lengths
    return penalty_factor * (left / buffer_len).clamp(-1.0, 0.0)
