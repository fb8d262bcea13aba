"""Computes REINFORCE++ advantages with the group's mean as baseline (REINFORCE++-baseline, arXiv 2501.03262)."""

from __future__ import annotations

import torch
from torch import Tensor

from megarl.algorithms.declaration import Needs, about
from megarl.algorithms.group_scores import group_scores, response_of
from megarl.algorithms.whitening import whitened
from megarl.config.algorithm import AlgorithmConfig
from megarl.types import Batch


@about("REINFORCE++-baseline, arXiv 2501.03262", needs=Needs(samples=2), sharded=True)
def reinforce_plus_plus_baseline(batch: Batch, config: AlgorithmConfig) -> Tensor:
    """Compute score - mean of its group, whitened over the batch.

    Returns:
        float32 [T]. A response alone in its group counts as its mean does: 0 before whitening.
    """
    centred = torch.zeros(len(batch), dtype=torch.float64)
    centred[batch.response_lengths > 0] = group_scores(batch).centred()[response_of(batch)]
    return batch.at_trained(whitened(batch, batch.trained(batch.spread(centred))))
