"""Computes advantages for the best of k responses (arXiv 2503.19595)."""

from __future__ import annotations

import torch
from torch import Tensor

from megarl.algorithms.declaration import Needs, about
from megarl.algorithms.group_scores import at_tokens, group_scores
from megarl.config.algorithm import AlgorithmConfig
from megarl.types import Batch


@about(
    "pass@k objective, leave-one-out, arXiv 2503.19595",
    keys=["algorithm.norm_adv_by_std_in_grpo"],
    needs=Needs(samples=2),
    sharded=True,
)
def grpo_passk(batch: Batch, config: AlgorithmConfig) -> Tensor:
    """Compute (best - second best score) / deviation of the group for a group's best response, 0 for the others.

    The difference is what the group's best score loses without that response.

    Returns:
        float32 [T]. Where several responses share the best score, or one is alone in its group, all have 0.
    """
    of = group_scores(batch)
    best = of.scores == of.highest()
    decides = best & (of.over_group(best.double(), "sum") == 1) & ~of.all_equal()
    second = of.over_group(torch.where(best, -torch.inf, of.scores), "amax")
    margin = torch.where(decides, of.scores - second, 0.0)
    return at_tokens(batch, margin / (of.std() + 1e-6) if config.norm_adv_by_std_in_grpo else margin)
