"""Rejection sampling: the best responses are learnt as they are (RAFT, arXiv 2304.06767, algorithm 1)."""

from __future__ import annotations

from torch import Tensor

from megarl.algorithms.declaration import Needs, about
from megarl.algorithms.group_scores import at_tokens, group_scores
from megarl.config.algorithm import AlgorithmConfig
from megarl.types import Batch


@about("RAFT, arXiv 2304.06767, algorithm 1", needs=Needs(samples=2), sharded=True)
def raft(batch: Batch, config: AlgorithmConfig) -> Tensor:
    """1 for the best-scored responses of each group, 0 for the others.

    Returns:
        float32 [T]. Where a group has one score only, a response alone in it included, none is better: all have 0.
    """
    of = group_scores(batch)
    return at_tokens(batch, (of.scores == of.highest()) & ~of.all_equal())
