"""Sums over the trained tokens that follow a trained token. Tokens between them that are not trained are passed over.

A rank has R trained tokens of M sequences; a sequence's come one after another.
"""

from __future__ import annotations

from torch import Tensor

from megarl.algorithms.over_tokens import count, variance
from megarl.types import Batch


def discounted_sums(x: Tensor, lengths: Tensor, factor: float) -> Tensor:
    """Compute at each trained token x_0 + factor x_1 + factor^2 x_2 + ..., over it and those after it in its sequence.

    The loop goes from the last tokens to the first, all sequences at once, the longest first: the sequences that still
    have a token are the first so many.

    Args:
        x: float64 [R].
        lengths: int64 [M], trained tokens per sequence.

    Returns:
        float64 [R].
    """
    sums = x.clone()
    longer = len(lengths) - lengths.bincount().cumsum(0)[:-1]  # [k]: sequences of more than k trained tokens
    places = lengths.cumsum(0)[lengths.argsort(descending=True)] - 1
    sum_after = sums.new_zeros(len(places))
    for sequences in longer.tolist():
        places = places[:sequences]
        sum_after = sums.index_select(0, places).add_(sum_after[:sequences], alpha=factor)
        sums.index_copy_(0, places, sum_after)
        places = places - 1
    return sums


def gae_advantages(batch: Batch, gamma: float, lam: float) -> Tensor:
    """Estimate generalised advantages (arXiv 1506.02438, eq. 16); float64 [R].

    Each is the sum of (gamma lam)^l delta_(t+l), with delta_t = reward_t + gamma value_(t+1) - value_t (eq. 10) and the
    value 0 after the last trained token.
    """
    assert batch.token_rewards is not None and batch.values is not None
    lengths = batch.own_response_lengths
    values = batch.trained(batch.values).double()
    following = values.roll(-1)
    following[lengths[lengths > 0].cumsum(0) - 1] = 0.0
    delta = following.mul_(gamma).add_(batch.trained(batch.token_rewards)).sub_(values)
    return discounted_sums(delta, lengths, gamma * lam)


def value_targets(batch: Batch, gamma: float, lam: float) -> Tensor:
    """Compute what the critic learns to predict: advantages before whitening + values (TD(lambda)); float32 [T].

    `lam` may be another than that of the policy's advantages (decoupled GAE, VC-PPO, arXiv 2503.01491).
    """
    assert batch.values is not None
    return batch.at_trained(gae_advantages(batch, gamma, lam) + batch.trained(batch.values))


def explained_variance(batch: Batch) -> float:
    """Compute 1 - Var(returns - values) / Var(returns) over trained tokens: 1 is perfect, 0 no better than the mean."""
    assert batch.values is not None and batch.returns is not None
    returns = batch.trained(batch.returns).double()
    error = returns - batch.trained(batch.values).double()
    of_returns = variance(batch, returns) if count(batch) else 0.0
    return 1.0 - variance(batch, error) / of_returns if of_returns > 0 else 0.0
