"""Keeps the best responses, which are learnt as they are: rejection sampling (RAFT, arXiv 2304.06767, algorithm 1)."""

from __future__ import annotations

from torch import Tensor

from megarl.algorithms.declaration import Needs, about
from megarl.algorithms.group_scores import at_tokens, group_scores
from megarl.config.algorithm import AlgorithmConfig
from megarl.types import Batch


@about("RAFT, arXiv 2304.06767, algorithm 1", needs=Needs(samples=2), sharded=True)
def raft(batch: Batch, config: AlgorithmConfig) -> Tensor:
    """Give advantage 1 to the best-scored responses of each group, 0 to the others.

    Returns:
        float32 [T]. Where a group has one score only, a response alone in it included, none is better: all have 0.
    """
    of = group_scores(batch)
    return at_tokens(batch, (of.scores == of.highest()) & ~of.all_equal())
