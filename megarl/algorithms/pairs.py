"""Computes parts of losses on pairs: rewards of sequences, the comparison of chosen and rejected ones, metrics."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from megarl.algorithms.loss import LossInput, LossOutput, Metric


def log_probs_of_sequences(x: LossInput, per_token: Tensor, *, mean: bool) -> Tensor:
    """Sum over the trained tokens of each sequence, or average over them: [R] -> [S], nats."""
    return x.mean_per_sequence(per_token) if mean else x.per_sequence(per_token)


def pair_weights(x: LossInput, per_sequence: Tensor) -> Tensor:
    """Compute the shares of pairs from those of sequences: [S] -> [S / 2]."""
    chosen, rejected = x.pairs(per_sequence)
    return chosen + rejected


def preferred(margin: Tensor, label_smoothing: float) -> Tensor:
    """Compute -log P(the chosen answer wins), P being logistic in the margin of its reward (Bradley and Terry).

    Args:
        label_smoothing: the share of pairs that are the wrong way round; the cross-entropy against it is "conservative"
            DPO (Mitchell 2023, https://ericmitchell.ai/cdpo.pdf, eq. 3).
    """
    right, wrong = logsigmoid(margin), logsigmoid(-margin)
    return -(1.0 - label_smoothing) * right - label_smoothing * wrong


def chosen_cross_entropy(x: LossInput, weights: Tensor) -> Tensor:
    """Compute minus the mean log-probability per token of each chosen answer, averaged over the pairs; a scalar.

    Args:
        weights: float32 [S / 2], shares of the pairs.
    """
    chosen, _ = x.pairs(log_probs_of_sequences(x, x.output, mean=True))
    return -weights.dot(chosen)


def pair_output(x: LossInput, loss: Tensor, rewards: Tensor, weights: Tensor, *, sft_coef: float) -> LossOutput:
    """Return a loss on pairs with its `pair_metrics`, which has the same arguments.

    Args:
        sft_coef: weight of `chosen_cross_entropy` beside the loss.
    """
    if sft_coef:
        loss = loss + sft_coef * chosen_cross_entropy(x, weights)
    return LossOutput(loss=loss, metrics=pair_metrics(x, rewards, weights))


def pair_metrics(x: LossInput, rewards: Tensor, weights: Tensor) -> dict[str, Metric]:
    """Compute means over the pairs: chosen_reward, rejected_reward, their difference `margin`, and `accuracy`, the
    share of pairs whose chosen answer has the higher reward.

    Args:
        rewards: float32 [S].
        weights: float32 [S / 2], their shares.
    """
    chosen, rejected = x.pairs(rewards.detach())
    means = {
        "accuracy": (chosen > rejected).to(weights.dtype),
        "margin": chosen - rejected,
        "chosen_reward": chosen,
        "rejected_reward": rejected,
    }
    return {name: Metric(value=torch.dot(weights, value)) for name, value in means.items()}
