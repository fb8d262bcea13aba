"""Sums over the trained tokens that are still to come. Tokens between them that are not trained are passed over."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from megarl.types import Batch


def discounted_sums(batch: Batch, per_token: Tensor, factor: float) -> Tensor:
    """At each trained token x_0 + factor x_1 + factor^2 x_2 + ..., over it and the trained tokens after it.

    Trained tokens are laid out by how many come after them in their sequence, and within that from the longest
    sequence to the shortest, so that one addition takes all sequences a token further without padding.

    Args:
        per_token: [T].

    Returns:
        float64 [T], 0 where nothing is trained.
    """
    lengths = batch.response_lengths
    ranks = torch.empty_like(lengths)
    ranks[lengths.argsort(descending=True)] = torch.arange(len(lengths))
    longer = len(lengths) - lengths.bincount().cumsum(0)[:-1]  # [k]: sequences of more than k trained tokens
    after = torch.repeat_interleave(lengths.cumsum(0), lengths) - 1 - torch.arange(int(lengths.sum()))
    places = (longer.cumsum(0) - longer)[after] + torch.repeat_interleave(ranks, lengths)

    sums = torch.empty(len(places), dtype=torch.float64)
    sums[places] = per_token[batch.response_mask].double()
    for later, here in pairwise(sums.split(longer.tolist())):
        here.add_(later[: len(here)], alpha=factor)
    out = torch.zeros(len(batch.tokens), dtype=torch.float64)
    out[batch.response_mask] = sums[places]
    return out


def gae_advantages(batch: Batch, gamma: float, lam: float) -> Tensor:
    """Generalised advantage estimation (arXiv 1506.02438, eq. 16); float64 [T].

    The sum of (gamma lam)^l delta_(t+l), with delta_t = reward_t + gamma value_(t+1) - value_t (eq. 10) and the value 0
    after the last trained token.
    """
    assert batch.token_rewards is not None and batch.values is not None
    mask, lengths = batch.response_mask, batch.response_lengths
    values = batch.values[mask].double()
    following = values.roll(-1)
    following[lengths[lengths > 0].cumsum(0) - 1] = 0.0
    delta = torch.zeros(len(mask), dtype=torch.float64)
    delta[mask] = batch.token_rewards[mask].double() + gamma * following - values
    return discounted_sums(batch, delta, gamma * lam)


def value_targets(batch: Batch, gamma: float, lam: float) -> Tensor:
    """What the critic learns to predict: advantages before whitening + values (TD(lambda)); float32 [T].

    `lam` may be another than that of the policy's advantages (decoupled GAE, VC-PPO, arXiv 2503.01491).
    """
    assert batch.values is not None
    targets = gae_advantages(batch, gamma, lam) + batch.values
    return torch.where(batch.response_mask, targets, 0.0).float()


def explained_variance(batch: Batch) -> float:
    """1 - Var(returns - values) / Var(returns) over the trained tokens: 1 is perfect, 0 no better than their mean."""
    assert batch.values is not None and batch.returns is not None
    returns = batch.returns[batch.response_mask].double()
    error = returns - batch.values[batch.response_mask].double()
    variance = float(returns.var(correction=0)) if len(returns) else 0.0
    return 1.0 - float(error.var(correction=0)) / variance if variance > 0 else 0.0
