"""Computes group-relative advantages (GRPO, arXiv 2402.03300, section 4.1.2)."""

from __future__ import annotations

from torch import Tensor

from megarl.algorithms.declaration import Needs, about
from megarl.algorithms.group_scores import GroupScores, at_tokens, group_scores
from megarl.config.algorithm import AlgorithmConfig
from megarl.types import Batch


@about(
    "GRPO, arXiv 2402.03300, section 4.1.2",
    keys=["algorithm.norm_adv_by_std_in_grpo"],
    needs=Needs(samples=2),
    sharded=True,
)
def grpo(batch: Batch, config: AlgorithmConfig) -> Tensor:
    """Compute (score - mean of its group) / standard deviation of its group.

    Returns:
        float32 [T]. A response alone in its group has advantage 0.
    """
    of = group_scores(batch)
    return at_tokens(batch, group_advantages(of.scores, of.groups, by_std=config.norm_adv_by_std_in_grpo))


def group_advantages(scores: Tensor, groups: Tensor, *, by_std: bool, eps: float = 1e-6) -> Tensor:
    """Compute (score - mean of its group) / std of its group.

    Args:
        scores: [N], one per response.
        groups: int64 [N], which prompt each response answers.
        by_std: divide by the group's (unbiased) standard deviation; without it, Dr. GRPO (arXiv 2503.20783).

    Returns:
        float32 [N]. A group of one response, or of equal scores, has advantage exactly 0.
    """
    of = GroupScores(scores=scores.double(), groups=groups)
    return (of.centred() / (of.std() + eps) if by_std else of.centred()).float()
