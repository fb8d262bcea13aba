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
from megarl.config.algorithm import RolloutCorrectionConfig
from megarl.types import Batch


def correct_rollouts(batch: Batch, config: RolloutCorrectionConfig) -> Batch:
    """The batch with `importance`, float32 [T]: truncated importance weights, 0 for rejected tokens.

    Unchanged if no correction is asked for. The ratio is p_train / p_rollout of each sampled token; of a sequence,
    their product (`sequence`) or geometric mean (`geometric`).
    """
    if not config.corrects:
        return batch
    log_ratio = log_ratios(batch)
    weights = batch.response_mask.float()
    if config.rollout_is is not None:
        ratio = bounded(_at_level(batch, log_ratio, config.rollout_is)).exp()
        weights = weights * ratio.clamp_max(config.rollout_is_threshold)
        if config.rollout_is_batch_normalize:
            weights = weights / _mean(batch, weights, config.rollout_is)
    if config.rollout_rs is not None:
        # thresholds may be beyond the bounds of `bounded`: the logarithms are compared
        found = _at_level(batch, log_ratio, config.rollout_rs)
        weights = weights * ((found >= math.log(config.rs_lower)) & (found <= math.log(config.rollout_rs_threshold)))
    if config.rollout_token_veto_threshold is not None:
        vetoed = (log_ratio < math.log(config.rollout_token_veto_threshold)) & batch.response_mask
        sequences = batch.sum_per_sequence(vetoed.float()) > 0
        weights = weights * ~sequences[batch.sequence_of_token]
    return batch.with_(importance=weights)


def without_truncated(batch: Batch) -> Batch:
    """The batch with weight 0 for the tokens of responses that were cut off (DAPO, arXiv 2503.14476, section 3.4)."""
    assert batch.truncated is not None
    weights = batch.response_mask.float() if batch.importance is None else batch.importance
    return batch.with_(importance=torch.where(batch.truncated[batch.sequence_of_token], 0.0, weights))


def log_ratios(batch: Batch) -> Tensor:
    """log p_train / p_rollout of each response token, 0 at prompt tokens; float32 [T], nats."""
    assert batch.old_logp is not None and batch.rollout_logp is not None
    return torch.where(batch.response_mask, batch.old_logp - batch.rollout_logp, 0.0)


def gap_metrics(batch: Batch) -> dict[str, float]:
    """How far the engine's distribution is from the training layout's, over the response tokens.

    logp_gap_*: |log-probability difference|; ratio_pNN: percentiles of p_train / p_rollout; kl_k1, kl_k3: estimates
    of KL(rollout || train) per token (http://joschu.net/blog/kl-approx.html); nats. staleness_*: versions of the
    weights, where older ones drew some of the tokens.
    """
    log_ratio = log_ratios(batch)[batch.response_mask]
    finite = bounded(log_ratio)
    ratio = finite.exp()
    # torch.quantile refuses more than 16 million values
    in_order = ratio.sort().values
    metrics = {
        "logp_gap_mean": float(log_ratio.abs().mean()),
        "logp_gap_max": float(log_ratio.abs().max()),
        "kl_k1": float(-log_ratio.mean()),
        "kl_k3": float((torch.expm1(finite) - finite).mean()),
    }
    for percent in (1, 50, 99):
        metrics[f"ratio_p{percent:02d}"] = float(in_order[round((len(in_order) - 1) * percent / 100)])
    if batch.staleness is not None:
        staleness = batch.staleness[batch.response_mask].double()
        metrics |= {"staleness_mean": float(staleness.mean()), "staleness_max": float(staleness.max())}
    if batch.importance is not None:
        weights = batch.importance[batch.response_mask]
        metrics["weight_mean"] = float(weights.mean())
        metrics["rejected"] = float((weights == 0).float().mean())
    return metrics


def _mean(batch: Batch, weights: Tensor, level: str) -> Tensor:
    """Of the response tokens' weights, or, where all tokens of a sequence have one, of the sequences'."""
    if level == "token":
        return weights[batch.response_mask].mean()
    answered = batch.response_lengths > 0
    return (batch.sum_per_sequence(weights)[answered] / batch.response_lengths[answered]).mean()


def _at_level(batch: Batch, log_ratio: Tensor, level: str) -> Tensor:
    """Log-ratio at each token [T]: of the token itself, or of its whole sequence."""
    if level == "token":
        return log_ratio
    of_sequence = batch.sum_per_sequence(log_ratio)
    if level == "geometric":
        of_sequence = of_sequence / batch.response_lengths.clamp_min(1)
    return of_sequence[batch.sequence_of_token]
