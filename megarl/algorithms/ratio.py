"""The ratio of the policy's probabilities to those before the update, and what is told about it."""

from __future__ import annotations

import torch
from torch import Tensor

from megarl.algorithms.kl import bounded
from megarl.algorithms.loss import LossInput, Metric


def log_ratio(x: LossInput) -> Tensor:
    """log p_new / p_old per token, bounded; float32 [R], nats, differentiable."""
    return bounded(x.output - x.old_logp)


def ratio_metrics(x: LossInput, log_ratios: Tensor, clipped: Tensor) -> dict[str, Metric]:
    """What a policy update reports.

    Args:
        log_ratios: float32 [R].
        clipped: bool [R], whose gradient the loss leaves out or changes.
    """
    w, log_ratios = x.weights, log_ratios.detach()
    metrics = {
        "clipfrac": Metric(value=w.dot(clipped.to(w.dtype))),
        "ppo_kl": Metric(value=-w.dot(log_ratios)),
    }
    if len(log_ratios):
        furthest = torch.expm1(log_ratios).abs().max()
        metrics["ratio_max_deviation"] = Metric(value=furthest, reduce="max")
        metrics["first_ratio_max_deviation"] = Metric(value=furthest, reduce="first")
    return metrics
