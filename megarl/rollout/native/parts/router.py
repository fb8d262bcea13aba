"""Chooses the experts of tokens in the native engine, in float32."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from megarl.models.parts.router import BEST_OF_A_GROUP, Router


def choose(
    router: Router, x: Tensor, weight: Tensor, bias: Tensor | None, added: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Choose each token's experts: their weights, float32, and numbers, both [T, experts_per_token].

    Args:
        x: [T, hidden].
        weight: [experts, hidden].
        bias: float32 [experts], added to the scores for the choice alone.
        added: [experts], added to the logits.
    """
    logits = F.linear(x.float(), weight.float(), None if added is None else added.float())
    scores = logits.softmax(-1) if router.score_function == "softmax" else logits.sigmoid()
    ranked = scores if bias is None else scores + bias
    if router.grouped:
        ranked = _within_best_groups(router, ranked)
    chosen = ranked.topk(router.experts_per_token, dim=-1).indices
    weights = scores.gather(1, chosen)
    if router.norm_topk_prob:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights * router.scaling_factor, chosen


def _within_best_groups(router: Router, scores: Tensor) -> Tensor:
    """Set the scores of experts outside each token's best groups to -inf."""
    groups = scores.unflatten(1, (router.num_groups, -1))
    best = groups.topk(BEST_OF_A_GROUP, dim=-1).values.sum(-1).topk(router.groups_per_token, dim=-1).indices
    outside = groups.new_ones(groups.shape[:2], dtype=bool).scatter_(1, best, False)
    return groups.masked_fill(outside.unsqueeze(-1), float("-inf")).flatten(1)
