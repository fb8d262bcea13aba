"""Distils a teacher on a policy's own responses (reverse KL: MiniLLM, arXiv 2306.08543; on-policy GKD, 2306.13649)."""

from __future__ import annotations

import torch
from torch import Tensor

from megarl.algorithms.declaration import Needs, about
from megarl.config.algorithm import AlgorithmConfig
from megarl.types import Batch


@about(
    "MiniLLM, arXiv 2306.08543, eq. 1; on-policy GKD, 2306.13649",
    needs=Needs(teacher=True, old_logp=True),
    sharded=True,
)
def on_policy_distillation(batch: Batch, config: AlgorithmConfig) -> Tensor:
    """Compute the teacher's log-probability - the policy's, of each token.

    In expectation over the policy's responses the difference is minus the KL to the teacher. Scores play no part.

    Returns:
        float32 [T], nats.
    """
    assert batch.teacher_logp is not None and batch.old_logp is not None
    return torch.where(batch.response_mask, batch.teacher_logp - batch.old_logp, 0.0)
