"""Computes the numbers that describe one step."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from megarl.algorithms.loss import Metric
from megarl.types import Rollouts


class StepMetrics:
    """Gathers what is logged during a step: one number by name."""

    def __init__(self) -> None:
        self._logged: dict[str, list[Metric]] = {}

    def add(self, prefix: str, metrics: Mapping[str, Metric | float]) -> None:
        """Log metrics as `{prefix}/{name}`, or `{name}` without a prefix."""
        for name, metric in metrics.items():
            full = f"{prefix}/{name}" if prefix else name
            value = metric if isinstance(metric, Metric) else Metric(value=float(metric))
            self._logged.setdefault(full, []).append(value)

    def collect(self) -> dict[str, float]:
        """Return each metric, reduced as its `reduce` says, in the order of first use, and forget them all."""
        logged, self._logged = self._logged, {}
        return {name: _reduced(metrics) for name, metrics in logged.items()}


def _reduced(metrics: Sequence[Metric]) -> float:
    values = [float(metric.value) for metric in metrics]
    kind = metrics[0].reduce
    return values[0] if kind == "first" else max(values) if kind == "max" else _mean(values)


def quantile(in_order: Sequence[float], share: float) -> float:
    """Return the number at or below which this share of sorted numbers lies."""
    return in_order[math.ceil(share * len(in_order)) - 1]


def response_metrics(rollouts: Rollouts) -> dict[str, float]:
    """Return length_mean, length_max: tokens per response; truncated: share that was cut off at max_response_length."""
    lengths = [len(rollout.response) for rollout in rollouts]
    return {
        "length_mean": _mean(lengths),
        "length_max": float(max(lengths)),
        "truncated": _mean([rollout.finish_reason == "length" for rollout in rollouts]),
    }


def reward_metrics(rollouts: Rollouts) -> dict[str, float]:
    """Compute mean: score; accuracy: share of scores of 1 or more; failed: responses without a score, in neither."""
    scores = [reward for reward in rollouts.rewards if reward is not None]
    return {
        "mean": _mean(scores),
        "accuracy": _mean([score >= 1.0 for score in scores]),
        "failed": float(len(rollouts) - len(scores)),
    }


def spread_metrics(rollouts: Rollouts) -> dict[str, float]:
    """Measure how far the scores are apart.

    std, min, max, p10, p50, p90: over all scored responses; no_signal: share of the groups with several scored
    responses whose scores are all the same; left out where no group has several.
    """
    scores = sorted(reward for reward in rollouts.rewards if reward is not None)
    mean = _mean(scores)
    metrics = {
        "std": math.sqrt(_mean([(score - mean) ** 2 for score in scores])),
        "min": scores[0],
        "max": scores[-1],
        **{f"p{percent}": quantile(scores, percent / 100) for percent in (10, 50, 90)},
    }
    groups = [[r for i in places if (r := rollouts[i].reward) is not None] for places in rollouts.groups]
    compared = [len(set(group)) == 1 for group in groups if len(group) > 1]
    return metrics | ({"no_signal": _mean(compared)} if compared else {})


def episode_metrics(rollouts: Rollouts) -> dict[str, float]:
    """Describe episodes, responses that an environment or an agent answered; empty if there are none.

    turns_mean, turns_max: how often the policy spoke; tool_s: seconds that environments or agents worked, per episode;
    observed: share of the responses' tokens that the policy did not say; limited: share of episodes that a limit ended.
    """
    parts = [[e for i in places if (e := rollouts[i].episode) is not None] for places in rollouts.episodes]
    episodes = [of_one for of_one in parts if of_one]
    if not episodes:
        return {}
    responses = [rollout.response for rollout in rollouts if rollout.episode is not None]
    turns = [sum(part.turns for part in of_one) for of_one in episodes]
    return {
        "turns_mean": _mean(turns),
        "turns_max": float(max(turns)),
        "tool_s": _mean([sum(part.seconds for part in of_one) for of_one in episodes]),
        "observed": sum(response.observed_count for response in responses) / max(1, sum(map(len, responses))),
        "limited": _mean([any(part.limited for part in of_one) for of_one in episodes]),
    }


def _mean(values: Sequence[float]) -> float:
    return float(sum(values)) / len(values)
