"""Computes on-policy advantages with the reward baseline of least variance (OPO, arXiv 2505.23585)."""

from __future__ import annotations

from torch import Tensor

from megarl.algorithms.declaration import Needs, about
from megarl.algorithms.group_scores import at_tokens, group_scores, over_parts, per_response
from megarl.config.algorithm import AlgorithmConfig
from megarl.types import Batch


@about("OPO, arXiv 2505.23585", needs=Needs(samples=2), sharded=True)
def opo(batch: Batch, config: AlgorithmConfig) -> Tensor:
    """Compute score - mean of its group, in which each response weighs as much as it has trained tokens.

    Returns:
        float32 [T]. A response alone in its group has advantage 0.
    """
    lengths = per_response(batch, over_parts(batch, batch.response_lengths))
    return at_tokens(batch, group_scores(batch).centred(lengths.double()))
