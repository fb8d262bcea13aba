"""The numbers that describe one RL step."""

from __future__ import annotations

from collections.abc import Sequence

from megarl.algorithms.rollout_correction import gap_metrics
from megarl.types import Batch, Rollouts


def step_metrics(rollouts: Rollouts, batch: Batch, updates: Sequence[dict[str, float]]) -> dict[str, float]:
    """Metrics by name.

    reward/*     mean score, share of scores of 1 or more
    response/*   tokens per response, share that was cut off at max_response_length
    rollout/*    the gap between the engine's and the training layout's distribution: `gap_metrics`
    actor/*      mean over the step's updates; *_max_* the largest; first_* of the first update, where the policy is
                 still the one that generated
    """
    lengths = [len(c.token_ids) for c in rollouts.completions]
    metrics = {
        "reward/mean": _mean(rollouts.rewards),
        "reward/accuracy": _mean([r >= 1.0 for r in rollouts.rewards]),
        "response/length_mean": _mean(lengths),
        "response/length_max": float(max(lengths)),
        "response/truncated": _mean([c.finish_reason == "length" for c in rollouts.completions]),
        **gap_metrics(batch),
        "tokens": float(len(batch.tokens)),
        "actor/first_ratio_max_deviation": updates[0]["actor/ratio_max_deviation"],
    }
    if batch.kl_in_reward is not None:
        metrics["reward/kl"] = float(batch.kl_in_reward.mean())
    for name in updates[0]:
        values = [update[name] for update in updates]
        metrics[name] = max(values) if "_max_" in name else _mean(values)
    return metrics


def _mean(values: Sequence[float]) -> float:
    return float(sum(values)) / len(values)
