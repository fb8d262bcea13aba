"""Scores beside those of their group: the scored responses to the same prompt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from megarl.types import Batch


@dataclass(frozen=True, kw_only=True)
class GroupScores:
    """One score per sequence, and its group.

    The arithmetic is float64, and equal scores are told by comparing them: the mean of 16 scores of 0.7 is not 0.7 in
    float32, and that difference over its own standard deviation is no small number.

    Attributes:
        scores: float64 [S].
        groups: int64 [S].
    """

    scores: Tensor
    groups: Tensor

    def over_group(self, x: Tensor, reduce: Literal["sum", "amin", "amax"]) -> Tensor:
        """[S] -> [S], at each sequence the sum, least or largest of its group."""
        out = x.new_zeros(int(self.groups.max()) + 1 if len(x) else 0)
        return out.scatter_reduce_(0, self.groups, x, reduce, include_self=False)[self.groups]

    def sizes(self) -> Tensor:
        """float64 [S], scored sequences in each one's group."""
        return self.over_group(torch.ones_like(self.scores), "sum")

    def highest(self) -> Tensor:
        """float64 [S], the best score in each one's group."""
        return self.over_group(self.scores, "amax")

    def all_equal(self) -> Tensor:
        """bool [S], whether its group has one score only; so it is for a response alone in its group."""
        return self.highest() == self.over_group(self.scores, "amin")

    def centred(self, weights: Tensor | None = None) -> Tensor:
        """Score - mean of its group, which `weights` (float64 [S]) weigh; float64 [S], exactly 0 if all are equal."""
        weights = torch.ones_like(self.scores) if weights is None else weights
        mean = self.over_group(weights * self.scores, "sum") / self.over_group(weights, "sum")
        return torch.where(self.all_equal(), 0.0, self.scores - mean)

    def std(self) -> Tensor:
        """Unbiased standard deviation of each one's group; float64 [S], exactly 0 if all are equal."""
        squares = self.over_group(self.centred().square(), "sum")
        return (squares / (self.sizes() - 1).clamp_min(1)).sqrt()


def group_scores(batch: Batch) -> GroupScores:
    """Those of the sequences that have trained tokens; the others were not scored."""
    assert batch.rewards is not None
    scored = batch.response_lengths > 0
    return GroupScores(scores=batch.rewards[scored].double(), groups=batch.groups[scored])


def at_tokens(batch: Batch, advantages: Tensor) -> Tensor:
    """One advantage per scored sequence -> float32 [T], at each of its tokens; 0 at sequences that were not scored."""
    per_sequence = torch.zeros(len(batch))
    per_sequence[batch.response_lengths > 0] = advantages.float()
    return per_sequence[batch.sequence_of_token]
