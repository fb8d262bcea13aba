"""Rewards -> advantages per token."""

from __future__ import annotations

import torch

from megarl.algorithms.kl import kl_estimate
from megarl.algorithms.registry import ESTIMATORS
from megarl.config.schema import Algorithm
from megarl.types import Batch


def compute_advantages(batch: Batch, config: Algorithm, kl_coef: float) -> Batch:
    """The batch with `advantages`: those of the scores, less the KL to the reference if that is in the reward.

    A sequence without trained tokens (its response was not scored) has advantage 0.

    Args:
        kl_coef: weight of that KL; it is kept as `kl_in_reward`.
    """
    assert batch.rewards is not None
    scores = batch.rewards
    if config.use_kl_in_reward:
        assert batch.old_logp is not None and batch.ref_logp is not None
        kl = batch.sum_per_sequence(kl_estimate(batch.old_logp, batch.ref_logp, config.kl_penalty))
        scores, batch = scores - kl_coef * kl, batch.with_(kl_in_reward=kl)
    estimated = ESTIMATORS.load(config.adv_estimator)(batch.with_(rewards=scores), config)
    return batch.with_(advantages=torch.where(batch.response_mask, estimated, 0.0))
