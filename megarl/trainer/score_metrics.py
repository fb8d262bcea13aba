"""The numbers that describe how responses were scored."""

from __future__ import annotations

import math
from collections.abc import Sequence

from megarl.rewards.judge import Failure, Scored

MOST_SOURCES = 64
"""Data sources with metrics of their own: a column that is different in every row names none."""


def score_metrics(results: Sequence[Scored | Failure], sources: Sequence[str]) -> dict[str, float]:
    """Numbers about scores, the same on every rank.

    Args:
        sources: data source of each response.

    Returns:
        part/{label}, and what functions returned beside their scores: means over the responses that have them.
        source/{source}/mean, source/{source}/accuracy: of the responses of a data source, if there are several.
        retried: further tries.
        latency_mean_s, latency_p95_s, latency_max_s: seconds of the calls.
    """
    if not results:
        return {}
    values: dict[str, list[float]] = {}
    several = 1 < len(set(sources)) <= MOST_SOURCES
    for result, source in zip(results, sources, strict=True):
        if isinstance(result, Failure):
            continue
        found = {f"part/{label}": score for label, score in result.parts.items() if label} | {**result.metrics}
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
        "latency_p95_s": seconds[math.ceil(0.95 * len(seconds)) - 1],
        "latency_max_s": seconds[-1],
    }
