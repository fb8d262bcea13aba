"""Computes GRPO's advantages without division by the group's deviation (Dr. GRPO, arXiv 2503.20783, section 3.2)."""

from __future__ import annotations

from torch import Tensor

from megarl.algorithms.declaration import Needs, about
from megarl.algorithms.group_scores import at_tokens, group_scores
from megarl.config.algorithm import AlgorithmConfig
from megarl.types import Batch


@about("Dr. GRPO, arXiv 2503.20783, section 3.2", needs=Needs(samples=2), sharded=True)
def dr_grpo(batch: Batch, config: AlgorithmConfig) -> Tensor:
    """Compute score - mean of its group.

    Dr. GRPO's loss has actor.loss_agg_mode=seq-mean-token-sum-norm.

    Returns:
        float32 [T]. A response alone in its group has advantage 0.
    """
    return at_tokens(batch, group_scores(batch).centred())
