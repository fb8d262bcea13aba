"""The numbers that describe one RL step."""

from __future__ import annotations

from collections.abc import Sequence

from megarl.types import Batch, Rollouts


def step_metrics(rollouts: Rollouts, batch: Batch, updates: Sequence[dict[str, float]]) -> dict[str, float]:
    """Metrics by name.

    reward/*     mean score, share of scores of 1 or more
    response/*   tokens per response, share that was cut off at max_response_length
    rollout/*    |log-probability by the engine - by the training layout| over the response tokens, nats
    actor/*      mean over the step's updates; *_max_* the largest; first_* of the first update, where the policy is
                 still the one that generated
    """
    assert batch.old_logp is not None and batch.rollout_logp is not None
    lengths = [len(c.token_ids) for c in rollouts.completions]
    gap = (batch.old_logp - batch.rollout_logp)[batch.response_mask].abs()
    metrics = {
        "reward/mean": _mean(rollouts.rewards),
        "reward/accuracy": _mean([r >= 1.0 for r in rollouts.rewards]),
        "response/length_mean": _mean(lengths),
        "response/length_max": float(max(lengths)),
        "response/truncated": _mean([c.finish_reason == "length" for c in rollouts.completions]),
        "rollout/logp_gap_mean": float(gap.mean()),
        "rollout/logp_gap_max": float(gap.max()),
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
