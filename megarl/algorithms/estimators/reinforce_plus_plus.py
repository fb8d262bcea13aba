"""REINFORCE with advantages that are normalised over the whole batch (REINFORCE++, arXiv 2501.03262)."""

from __future__ import annotations

from torch import Tensor

from megarl.algorithms.declaration import about
from megarl.algorithms.returns import discounted_sums
from megarl.algorithms.whitening import whitened
from megarl.config.schema import Algorithm
from megarl.types import Batch


@about("REINFORCE++, arXiv 2501.03262, advantage normalisation", keys=["algorithm.gamma"])
def reinforce_plus_plus(batch: Batch, config: Algorithm) -> Tensor:
    """Discounted rewards from each token on, whitened over the batch.

    Returns:
        float32 [T].
    """
    assert batch.token_rewards is not None
    return whitened(batch, discounted_sums(batch, batch.token_rewards, config.gamma))
