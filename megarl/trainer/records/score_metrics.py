"""Computes the numbers that describe how responses were scored."""

from __future__ import annotations

import math
from collections.abc import Sequence

from megarl.rewards.results import Failure, Scored
from megarl.trainer.records.step_metrics import quantile
from megarl.types import Rollouts

MOST_SOURCES = 64
"""Data sources with metrics of their own: a column that is different in every row names none."""


def parts_by_name(scored: Scored) -> dict[str, float]:
    """Return the parts of a score as part/{label}, and what functions returned beside their scores."""
    return {f"part/{label}": score for label, score in scored.parts.items() if label} | {**scored.metrics}


def part_metrics(rollouts: Rollouts) -> dict[str, float]:
    """Compute numbers about what scores are made of, the same on every rank.

    Returns:
        part/{label}, and what functions returned beside their scores: means over the responses that have them.
        source/{source}/mean, source/{source}/accuracy: of the responses of a data source, if there are several.
    """
    values: dict[str, list[float]] = {}
    several = 1 < len({rollout.prompt.data_source for rollout in rollouts}) <= MOST_SOURCES
    for rollout in rollouts:
        if rollout.reward is None:
            continue
        numbers = dict(rollout.parts)
        if several:
            numbers[f"source/{rollout.prompt.data_source}/mean"] = rollout.reward
            numbers[f"source/{rollout.prompt.data_source}/accuracy"] = float(rollout.reward >= 1.0)
        for name, value in numbers.items():
            values.setdefault(name, []).append(value)
    return {name: math.fsum(values[name]) / len(values[name]) for name in sorted(values)}


def call_metrics(results: Sequence[Scored | Failure]) -> dict[str, float]:
    """Compute numbers about the calls of reward functions, the same on every rank.

    Returns:
        retried: further tries.
        latency_mean_s, latency_p50_s, latency_p95_s, latency_max_s: seconds of the calls.
    """
    seconds = sorted(second for result in results for second in result.seconds)
    if not seconds:
        return {}
    return {
        "retried": float(sum(result.retried for result in results)),
        "latency_mean_s": math.fsum(seconds) / len(seconds),
        "latency_p50_s": quantile(seconds, 0.5),
        "latency_p95_s": quantile(seconds, 0.95),
        "latency_max_s": seconds[-1],
    }
