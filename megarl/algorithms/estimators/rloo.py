"""Computes REINFORCE advantages with the leave-one-out baseline (RLOO, arXiv 2402.14740)."""

from __future__ import annotations

from torch import Tensor

from megarl.algorithms.declaration import Needs, about
from megarl.algorithms.group_scores import at_tokens, group_scores
from megarl.config.algorithm import AlgorithmConfig
from megarl.types import Batch


@about("RLOO, arXiv 2402.14740", needs=Needs(samples=2), sharded=True)
def rloo(batch: Batch, config: AlgorithmConfig) -> Tensor:
    """Compute score - mean of the other scores of its group.

    With n scores the difference is n / (n - 1) times the distance from the mean of all.

    Returns:
        float32 [T]. A response alone in its group has advantage 0: there is no other to compare it with.
    """
    of = group_scores(batch)
    others = (of.sizes() - 1).clamp_min(1)
    return at_tokens(batch, of.centred() * of.sizes() / others)
