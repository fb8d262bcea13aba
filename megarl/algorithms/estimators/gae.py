"""Computes PPO's advantages from a critic's values (GAE, arXiv 1506.02438, eq. 16)."""

from __future__ import annotations

from torch import Tensor

from megarl.algorithms.declaration import Needs, about
from megarl.algorithms.returns import gae_advantages
from megarl.algorithms.whitening import whitened
from megarl.config.algorithm import AlgorithmConfig
from megarl.types import Batch


@about(
    "GAE, arXiv 1506.02438, eq. 16; decoupled from the critic's: VC-PPO, 2503.01491",
    keys=["algorithm.gamma", "algorithm.lam", "critic.lam"],
    needs=Needs(critic=True),
    sharded=True,
)
def gae(batch: Batch, config: AlgorithmConfig) -> Tensor:
    """Compute decaying sums of the critic's errors (temporal differences), whitened over the batch.

    Returns:
        float32 [T].
    """
    return batch.at_trained(whitened(batch, gae_advantages(batch, config.gamma, config.lam)))
