"""Rewards -> advantages per token."""

from __future__ import annotations

import torch

from megarl.algorithms.grpo import group_advantages
from megarl.algorithms.kl import kl_estimate
from megarl.config.schema import Algorithm
from megarl.types import Batch


def compute_advantages(batch: Batch, config: Algorithm, kl_coef: float) -> Batch:
    """The batch with `advantages`: group-relative, of the scores less the KL to the reference if that is in the reward.

    A sequence without trained tokens (its response was not scored) takes no part in its group, and has advantage 0.

    Args:
        kl_coef: weight of that KL; it is kept as `kl_in_reward`.
    """
    assert batch.rewards is not None
    scores = batch.rewards
    if config.use_kl_in_reward:
        assert batch.old_logp is not None and batch.ref_logp is not None
        kl = batch.sum_per_sequence(kl_estimate(batch.old_logp, batch.ref_logp, config.kl_penalty))
        scores, batch = scores - kl_coef * kl, batch.with_(kl_in_reward=kl)
    scored, per_sequence = batch.response_lengths > 0, torch.zeros_like(scores)
    per_sequence[scored] = group_advantages(scores[scored], batch.groups[scored], by_std=config.norm_adv_by_std_in_grpo)
    return batch.with_(advantages=torch.where(batch.response_mask, per_sequence[batch.sequence_of_token], 0.0))
