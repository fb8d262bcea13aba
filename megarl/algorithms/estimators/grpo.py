"""Group-relative advantages (GRPO, arXiv 2402.03300, section 4.1.2)."""

from __future__ import annotations

import torch
from torch import Tensor

from megarl.algorithms.declaration import Needs, about
from megarl.config.schema import Algorithm
from megarl.types import Batch


@about("GRPO, arXiv 2402.03300, section 4.1.2", keys=["algorithm.norm_adv_by_std_in_grpo"], needs=Needs(samples=2))
def grpo(batch: Batch, config: Algorithm) -> Tensor:
    """`group_advantages` of the scored sequences, at each of their tokens; float32 [T]."""
    assert batch.rewards is not None
    scored, advantages = batch.response_lengths > 0, torch.zeros_like(batch.rewards)
    scores, groups = batch.rewards[scored], batch.groups[scored]
    advantages[scored] = group_advantages(scores, groups, by_std=config.norm_adv_by_std_in_grpo)
    return advantages[batch.sequence_of_token]


def group_advantages(scores: Tensor, groups: Tensor, *, by_std: bool, eps: float = 1e-6) -> Tensor:
    """(score - mean of its group) / std of its group.

    The arithmetic is float64, and equal scores are told by comparing them: the mean of 16 scores of 0.7 is not 0.7 in
    float32, and that difference over its own standard deviation is no small number.

    Args:
        scores: float32 [N], one per sequence.
        groups: int64 [N], which prompt each sequence answers.
        by_std: divide by the group's (unbiased) standard deviation; without it, Dr. GRPO (arXiv 2503.20783).

    Returns:
        float32 [N]. A group of one sequence, or of equal scores, has advantage exactly 0.
    """
    n, exact = int(groups.max()) + 1 if len(groups) else 0, scores.double()
    counts = exact.new_zeros(n).index_add_(0, groups, torch.ones_like(exact))
    centred = exact - (exact.new_zeros(n).index_add_(0, groups, exact) / counts)[groups]
    lowest = exact.new_zeros(n).scatter_reduce_(0, groups, exact, "amin", include_self=False)
    highest = exact.new_zeros(n).scatter_reduce_(0, groups, exact, "amax", include_self=False)
    centred = torch.where((lowest == highest)[groups], 0.0, centred)
    if by_std:
        variance = exact.new_zeros(n).index_add_(0, groups, centred.square()) / (counts - 1).clamp_min(1)
        centred = centred / (variance.sqrt()[groups] + eps)
    return centred.float()
