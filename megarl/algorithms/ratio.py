"""Computes the ratio of the policy's probabilities to those before the update, its clipping, and metrics of it."""

from __future__ import annotations

import torch
from torch import Tensor

from megarl.algorithms.kl import bounded
from megarl.algorithms.loss import LossInput, LossOutput, Metric

CLIP_KEYS = ("actor.clip_ratio", "actor.clip_ratio_low", "actor.clip_ratio_high")
"""The configuration keys of `Actor.clip_low` and `Actor.clip_high`."""


def log_ratio(x: LossInput) -> Tensor:
    """Compute log p_new / p_old per token, bounded; float32 [R], nats, differentiable."""
    return bounded(x.output - x.old_logp)


def clipped_surrogate(cost: Tensor, ratio: Tensor, clip_low: float, clip_high: float) -> tuple[Tensor, Tensor]:
    """Compute the larger of cost x ratio and cost x clipped ratio (PPO, arXiv 1707.06347, eq. 7).

    Args:
        cost: minus the advantages, [R] or [S].
        ratio: the same shape; it is clipped to [1 - clip_low, 1 + clip_high].

    Returns:
        the surrogate, and bool where the ratio is outside its range.
    """
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    return (cost * ratio).maximum(cost * clipped), clipped != ratio


def policy_output(x: LossInput, loss: Tensor, log_ratios: Tensor, clipfrac: Tensor | None = None) -> LossOutput:
    """Return a policy's loss with the metrics that an update reports.

    Args:
        loss: scalar, differentiable.
        log_ratios: float32 [R], nats.
        clipfrac: scalar, the share of the weights whose gradient the loss leaves out or changes; None if it has no
            clip.
    """
    log_ratios = log_ratios.detach()
    metrics = {"pg_loss": Metric(value=loss.detach()), "ppo_kl": Metric(value=-x.weights.dot(log_ratios))}
    if clipfrac is not None:
        metrics["clipfrac"] = Metric(value=clipfrac)
    if len(log_ratios):
        furthest = torch.expm1(log_ratios).abs().max()
        metrics["ratio_max_deviation"] = Metric(value=furthest, reduce="max")
        metrics["first_ratio_max_deviation"] = Metric(value=furthest, reduce="first")
    return LossOutput(loss=loss, metrics=metrics)
