"""The numbers that describe how responses were scored."""

from __future__ import annotations

import math
from collections.abc import Sequence

from megarl.rewards.judge import Failure, Scored
from megarl.trainer.records.step_metrics import quantile

MOST_SOURCES = 64
"""Data sources with metrics of their own: a column that is different in every row names none."""


def parts_by_name(scored: Scored) -> dict[str, float]:
    """part/{label}, and what functions returned beside their scores."""
    return {f"part/{label}": score for label, score in scored.parts.items() if label} | {**scored.metrics}


def score_metrics(results: Sequence[Scored | Failure], sources: Sequence[str]) -> dict[str, float]:
    """Numbers about scores, the same on every rank.

    Args:
        sources: data source of each response.

    Returns:
        part/{label}, and what functions returned beside their scores: means over the responses that have them.
        source/{source}/mean, source/{source}/accuracy: of the responses of a data source, if there are several.
        retried: further tries.
        latency_mean_s, latency_p50_s, latency_p95_s, latency_max_s: seconds of the calls.
    """
    if not results:
        return {}
    values: dict[str, list[float]] = {}
    several = 1 < len(set(sources)) <= MOST_SOURCES
    for result, source in zip(results, sources, strict=True):
        if isinstance(result, Failure):
            continue
        found = parts_by_name(result)
        if several:
            found[f"source/{source}/mean"] = result.score
            found[f"source/{source}/accuracy"] = float(result.score >= 1.0)
        for name, value in found.items():
            values.setdefault(name, []).append(value)
    seconds = sorted(second for result in results for second in result.seconds)
    return {
        **{name: math.fsum(values[name]) / len(values[name]) for name in sorted(values)},
        "retried": float(sum(result.retried for result in results)),
        "latency_mean_s": math.fsum(seconds) / len(seconds),
        "latency_p50_s": quantile(seconds, 0.5),
        "latency_p95_s": quantile(seconds, 0.95),
        "latency_max_s": seconds[-1],
    }
