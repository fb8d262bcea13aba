"""Corrects for the engine having sampled from another distribution than the training layout computes.

The engine's kernels, precision, and sampling filters make its log-probabilities differ from the training layout's.
Truncated importance sampling weighs each token or sequence by the ratio of the two, capped ("Your Efficient RL
Framework Secretly Brings You Off-Policy RL Training", Yao et al. 2025; truncation: Ionides 2008, "Truncated Importance
Sampling"); rejection leaves out those where the ratio is outside a range.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megarl.algorithms.kl import bounded
from megarl.algorithms.over_tokens import extremes, mean, percentiles
from megarl.config.algorithm import RolloutCorrectionConfig
from megarl.types import Batch


def correct_rollouts(batch: Batch, config: RolloutCorrectionConfig) -> Batch:
    """Add `importance` to a batch, float32 [T]: truncated importance weights, 0 for rejected tokens.

    The batch stays as it is if no correction is asked for. The ratio is p_train / p_rollout of each sampled token; of a
    sequence, their product (`sequence`) or geometric mean (`geometric`).
    """
    if not config.corrects:
        return batch
    log_ratio = log_ratios(batch)
    weights = batch.response_mask.float()
    if config.rollout_is is not None:
        ratio = bounded(_at_level(batch, log_ratio, config.rollout_is)).exp()
        weights = weights * ratio.clamp_max(config.rollout_is_threshold)
        if config.rollout_is_batch_normalize:
            weights = weights / _mean_weight(batch, weights, config.rollout_is)
    if config.rollout_rs is not None:
        # thresholds may be beyond the bounds of `bounded`: the logarithms are compared
        ratio = _at_level(batch, log_ratio, config.rollout_rs)
        weights = weights * ((ratio >= math.log(config.rs_lower)) & (ratio <= math.log(config.rollout_rs_threshold)))
    if config.rollout_token_veto_threshold is not None:
        vetoed = (log_ratio < math.log(config.rollout_token_veto_threshold)) & batch.response_mask
        sequences = batch.sum_per_sequence(vetoed.float()) > 0
        weights = weights * ~batch.spread(sequences)
    return batch.with_(importance=weights)


def without_truncated(batch: Batch) -> Batch:
    """Give weight 0 to the tokens of responses that were cut off (DAPO, arXiv 2503.14476, section 3.4)."""
    assert batch.truncated is not None
    weights = batch.response_mask.float() if batch.importance is None else batch.importance
    return batch.with_(importance=torch.where(batch.spread(batch.truncated), 0.0, weights))


def log_ratios(batch: Batch) -> Tensor:
    """Compute log p_train / p_rollout of each response token, 0 at prompt tokens; float32 [T], nats."""
    assert batch.old_logp is not None and batch.rollout_logp is not None
    return torch.where(batch.response_mask, batch.old_logp - batch.rollout_logp, 0.0)


def gap_metrics(batch: Batch) -> dict[str, float]:
    """Measure how far the engine's distribution is from the training layout's, over the response tokens.

    logp_gap_*: |log-probability difference|; ratio_pNN: percentiles of p_train / p_rollout; kl_k1, kl_k3: estimates
    of KL(rollout || train) per token (http://joschu.net/blog/kl-approx.html); nats. staleness_*: versions of the
    weights, where older ones drew some of the tokens.
    """
    log_ratio = batch.trained(log_ratios(batch))
    finite = bounded(log_ratio)
    metrics = {
        "logp_gap_mean": mean(batch, log_ratio.abs()),
        "logp_gap_max": extremes(batch, log_ratio.abs())[1],
        "kl_k1": mean(batch, -log_ratio),
        "kl_k3": mean(batch, torch.expm1(finite) - finite),
    }
    percents = (1, 50, 99)
    for percent, ratio in zip(percents, percentiles(batch, finite.exp(), percents), strict=True):
        metrics[f"ratio_p{percent:02d}"] = ratio
    if batch.staleness is not None:
        staleness = batch.trained(batch.staleness)
        metrics |= {"staleness_mean": mean(batch, staleness), "staleness_max": extremes(batch, staleness)[1]}
    if batch.importance is not None:
        weights = batch.trained(batch.importance)
        metrics |= {"weight_mean": mean(batch, weights), "rejected": mean(batch, weights == 0)}
    return metrics


def _mean_weight(batch: Batch, weights: Tensor, level: str) -> float:
    """Average the weights of response tokens, or of sequences where all tokens of a sequence have one weight."""
    if level == "token":
        return mean(batch, batch.trained(weights))
    answered = batch.response_lengths > 0
    return float((batch.sum_per_sequence(weights)[answered] / batch.response_lengths[answered]).mean())


def _at_level(batch: Batch, log_ratio: Tensor, level: str) -> Tensor:
    """Return the log-ratio at each token [T]: of the token itself, or of its whole sequence."""
    if level == "token":
        return log_ratio
    of_sequence = batch.sum_per_sequence(log_ratio)
    if level == "geometric":
        of_sequence = of_sequence / batch.response_lengths.clamp_min(1)
    return batch.spread(of_sequence)
