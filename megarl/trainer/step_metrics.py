"""The numbers that describe one RL step."""

from __future__ import annotations

from collections.abc import Sequence

from megarl.algorithms.rollout_correction import gap_metrics
from megarl.types import Batch, Rollouts


def step_metrics(rollouts: Rollouts, batch: Batch, updates: Sequence[dict[str, float]]) -> dict[str, float]:
    """Metrics by name.

    reward/*     `reward_metrics`, and the mean KL to the reference where the reward contains it
    response/*   tokens per response, share that was cut off at max_response_length
    rollout/*    the gap between the engine's and the training layout's distribution: `gap_metrics`
    actor/*      mean over the step's updates; *_max_* the largest; first_* of the first update, where the policy is
                 still the one that generated
    """
    lengths = [len(c.token_ids) for c in rollouts.completions]
    metrics = {
        **{f"reward/{name}": value for name, value in reward_metrics(rollouts).items()},
        "response/length_mean": _mean(lengths),
        "response/length_max": float(max(lengths)),
        "response/truncated": _mean([c.finish_reason == "length" for c in rollouts.completions]),
        **gap_metrics(batch),
        "tokens": float(len(batch.tokens)),
        "actor/first_ratio_max_deviation": updates[0].get("actor/ratio_max_deviation", 0.0),
    }
    if batch.kl_in_reward is not None:
        metrics["reward/kl"] = float(batch.kl_in_reward[batch.response_lengths > 0].mean())
    for name in sorted(set().union(*updates)):  # an update of which no response was scored has only some
        values = [update[name] for update in updates if name in update]
        metrics[name] = max(values) if "_max_" in name else _mean(values)
    return metrics


def reward_metrics(rollouts: Rollouts) -> dict[str, float]:
    """mean: score; accuracy: share of scores of 1 or more; failed: responses without a score, in neither of the two."""
    scores = [reward for reward in rollouts.rewards if reward is not None]
    return {
        "mean": _mean(scores),
        "accuracy": _mean([score >= 1.0 for score in scores]),
        "failed": float(len(rollouts.rewards) - len(scores)),
    }


def _mean(values: Sequence[float]) -> float:
    return float(sum(values)) / len(values)
