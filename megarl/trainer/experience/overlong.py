"""Penalties of responses near their greatest length."""

from __future__ import annotations

from megarl.algorithms.overlong import soft_overlong_penalty
from megarl.config import Config
from megarl.types import Rollouts


def overlong_penalties(rollouts: Rollouts, config: Config) -> list[float]:
    """Compute `soft_overlong_penalty` of each rollout, as `reward.overlong_buffer` says; 0 where it is off.

    All parts of a response have that of the longest.
    """
    buffer = config.reward.overlong_buffer
    if not buffer.enable:
        return [0.0] * len(rollouts)
    penalties = [0.0] * len(rollouts)
    for places in rollouts.episodes:
        penalty = soft_overlong_penalty(
            max(len(rollouts[i].token_ids) for i in places),
            max_response_length=config.data.max_response_length,
            buffer_len=buffer.len,
            penalty_factor=buffer.penalty_factor,
        )
        for i in places:
            penalties[i] = penalty
    return penalties
