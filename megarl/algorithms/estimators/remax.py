"""Computes REINFORCE advantages with the greedy response's score as baseline (ReMax, arXiv 2310.10505, algorithm 1)."""

from __future__ import annotations

from torch import Tensor

from megarl.algorithms.declaration import Needs, about
from megarl.algorithms.group_scores import at_tokens, group_scores, per_response
from megarl.config.algorithm import AlgorithmConfig
from megarl.types import Batch


@about("ReMax, arXiv 2310.10505, algorithm 1", needs=Needs(greedy=True), sharded=True)
def remax(batch: Batch, config: AlgorithmConfig) -> Tensor:
    """Compute score - score of the greedy response to the same prompt.

    Returns:
        float32 [T].
    """
    assert batch.greedy_rewards is not None
    return at_tokens(batch, group_scores(batch).scores - per_response(batch, batch.greedy_rewards))
