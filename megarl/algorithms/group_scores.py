"""Compares scores with those of their group: the scored responses to the same prompt.

A response may consist of several sequences, all with its score (`Batch.episodes`). Each response counts once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from megarl.types import Batch


@dataclass(frozen=True, kw_only=True)
class GroupScores:
    """Holds one score per response, and its group.

    The arithmetic is float64, and equal scores are told by comparing them: the mean of 16 scores of 0.7 is not 0.7 in
    float32, and that difference over its own standard deviation is no small number.

    Attributes:
        scores: float64 [R].
        groups: int64 [R].
    """

    scores: Tensor
    groups: Tensor

    def over_group(self, x: Tensor, reduce: Literal["sum", "amin", "amax"]) -> Tensor:
        """Reduce each group of x: [R] -> [R], at each response the sum, least or largest of its group."""
        out = x.new_zeros(int(self.groups.max()) + 1 if len(x) else 0)
        return out.scatter_reduce_(0, self.groups, x, reduce, include_self=False)[self.groups]

    def sizes(self) -> Tensor:
        """Count the scored responses in each response's group; float64 [R]."""
        return self.over_group(torch.ones_like(self.scores), "sum")

    def highest(self) -> Tensor:
        """Find the best score in each response's group; float64 [R]."""
        return self.over_group(self.scores, "amax")

    def all_equal(self) -> Tensor:
        """Tell whether a response's group has one score only, as the group of a lone response has; bool [R]."""
        return self.highest() == self.over_group(self.scores, "amin")

    def centred(self, weights: Tensor | None = None) -> Tensor:
        """Compute score - mean of its group, weighted by `weights`; both float64 [R], exactly 0 if all are equal."""
        weights = torch.ones_like(self.scores) if weights is None else weights
        mean = self.over_group(weights * self.scores, "sum") / self.over_group(weights, "sum")
        return torch.where(self.all_equal(), 0.0, self.scores - mean)

    def std(self) -> Tensor:
        """Compute the unbiased standard deviation of each response's group; float64 [R], exactly 0 if all are equal."""
        squares = self.over_group(self.centred().square(), "sum")
        return (squares / (self.sizes() - 1).clamp_min(1)).sqrt()


def group_scores(batch: Batch) -> GroupScores:
    """Collect the scores of the responses that have trained tokens; the others were not scored."""
    assert batch.rewards is not None
    return GroupScores(scores=per_response(batch, batch.rewards).double(), groups=per_response(batch, batch.groups))


def response_of(batch: Batch) -> Tensor:
    """Number the response, of R with trained tokens, to which each sequence with trained tokens belongs; int64 [S]."""
    numbers = torch.arange(len(batch)) if batch.episodes is None else batch.episodes
    return torch.unique(numbers[batch.response_lengths > 0], return_inverse=True)[1]


def per_response(batch: Batch, per_sequence: Tensor) -> Tensor:
    """Take for each response what is the same at all of its sequences: [N] -> [R]."""
    of = response_of(batch)
    out = per_sequence.new_zeros(int(of.max()) + 1 if len(of) else 0)
    out[of] = per_sequence[batch.response_lengths > 0]
    return out


def over_parts(batch: Batch, per_sequence: Tensor) -> Tensor:
    """Sum over the sequences of each response: [N] -> [N], at each sequence its response's sum."""
    if batch.episodes is None:
        return per_sequence
    return torch.zeros_like(per_sequence).index_add_(0, batch.episodes, per_sequence)[batch.episodes]


def at_tokens(batch: Batch, advantages: Tensor) -> Tensor:
    """Spread one advantage per response, float [R], over its tokens: float32 [T], 0 at those that were not scored."""
    per_sequence = torch.zeros(len(batch))
    per_sequence[batch.response_lengths > 0] = advantages.float()[response_of(batch)]
    return batch.spread(per_sequence)
