"""Group-relative advantages (GRPO, arXiv 2402.03300, section 4.1.2)."""

from __future__ import annotations

import torch
from torch import Tensor


def group_advantages(scores: Tensor, groups: Tensor, *, by_std: bool, eps: float = 1e-6) -> Tensor:
    """(score - mean of its group) / std of its group.

    Args:
        scores: float32 [N], one per sequence.
        groups: int64 [N], which prompt each sequence answers.
        by_std: divide by the group's (unbiased) standard deviation; without it, Dr. GRPO (arXiv 2503.20783).

    Returns:
        float32 [N]. A group of one sequence, or of equal scores, has advantage 0.
    """
    n = int(groups.max()) + 1 if len(groups) else 0
    counts = torch.zeros(n).index_add_(0, groups, torch.ones_like(scores))
    mean = torch.zeros(n).index_add_(0, groups, scores) / counts
    centred = scores - mean[groups]
    if not by_std:
        return centred
    variance = torch.zeros(n).index_add_(0, groups, centred.square()) / (counts - 1).clamp_min(1)
    return centred / (variance.sqrt()[groups] + eps)
