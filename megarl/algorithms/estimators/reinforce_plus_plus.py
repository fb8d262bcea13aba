"""Computes advantages for REINFORCE that are normalised over the whole batch (REINFORCE++, arXiv 2501.03262)."""

from __future__ import annotations

from torch import Tensor

from megarl.algorithms.declaration import about
from megarl.algorithms.returns import discounted_sums
from megarl.algorithms.whitening import whitened
from megarl.config.algorithm import AlgorithmConfig
from megarl.types import Batch


@about("REINFORCE++, arXiv 2501.03262", keys=["algorithm.gamma"], sharded=True)
def reinforce_plus_plus(batch: Batch, config: AlgorithmConfig) -> Tensor:
    """Compute the discounted sum of rewards from each token on, whitened over the batch.

    Returns:
        float32 [T].
    """
    assert batch.token_rewards is not None
    rewards = batch.trained(batch.token_rewards).double()
    return batch.at_trained(whitened(batch, discounted_sums(rewards, batch.own_response_lengths, config.gamma)))
