"""Computes estimates from scored responses, per data source and over all prompts. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol, TypeVar

from rich.markup import escape
from rich.table import Table

from megarl.evaluation.records import Record, by_prompt
from megarl.evaluation.statistics import Estimate, estimate, majority_at_k, pass_at_k, powers_of_two

MOST_SOURCES = 64
"""Data sources that are reported apart at most: a column with a different text in every row names no sources."""


@dataclass(frozen=True, kw_only=True)
class Summary:
    """Summarizes one data source. A response whose scoring failed counts only in `failed`, `length` and `truncated`.

    Attributes:
        source: the data source; empty for all prompts together.
        prompts: number of prompts.
        responses: number of responses.
        failed: number of responses without a score.
        mean: score, averaged over a prompt's responses and then over prompts (mean@n).
        pass_at: k -> pass@k over the prompts with k scores or more.
        maj_at: k -> maj@k over the same prompts.
        length: tokens per response.
        truncated: share of responses that were cut off at the maximum length.
    """

    source: str
    prompts: int
    responses: int
    failed: int
    mean: Estimate | None
    pass_at: Mapping[int, Estimate]
    maj_at: Mapping[int, Estimate]
    length: float
    truncated: float


def summarize(records: Sequence[Record], ks: Sequence[int] = ()) -> list[Summary]:
    """Summarize each named data source, in order of first appearance, and last all records.

    Args:
        ks: k of pass@k and maj@k; default powers of two up to the number of samples per prompt.
    """
    ks = ks or powers_of_two(max(map(len, by_prompt(records).values())))
    return [*(_summary(name, part, ks) for name, part in by_source(records).items()), _summary("", records, ks)]


class _HasSource(Protocol):
    @property
    def source(self) -> str: ...


T = TypeVar("T", bound=_HasSource)


def by_source(items: Sequence[T]) -> dict[str, list[T]]:
    """Group items by their named data sources, in order of first appearance; {} for more than `MOST_SOURCES`."""
    sources: dict[str, list[T]] = {}
    for item in items:
        sources.setdefault(item.source, []).append(item)
    return {name: part for name, part in sources.items() if name} if len(sources) <= MOST_SOURCES else {}


def _summary(source: str, records: Sequence[Record], ks: Sequence[int]) -> Summary:
    prompts = by_prompt(records)
    groups = [[record for record in group if record.score is not None] for group in prompts.values()]
    means = [sum(record.score or 0.0 for record in group) / len(group) for group in groups if group]
    pass_at = {k: [pass_at_k(len(g), sum(r.right for r in g), k) for g in groups if len(g) >= k] for k in ks}
    maj_at = {k: [_majority(group, k) for group in groups if len(group) >= k] for k in ks if k > 1}
    return Summary(
        source=source,
        prompts=len(prompts),
        responses=len(records),
        failed=sum(record.score is None for record in records),
        mean=estimate(means),
        pass_at={k: result for k, values in pass_at.items() if (result := estimate(values))},
        maj_at={k: result for k, values in maj_at.items() if (result := estimate(values))},
        length=sum(record.tokens for record in records) / len(records),
        truncated=sum(record.finish == "length" for record in records) / len(records),
    )


def _majority(records: Sequence[Record], k: int) -> float:
    return majority_at_k([record.vote for record in records], [float(record.right) for record in records], k)


def metrics(summaries: Sequence[Summary]) -> dict[str, float]:
    """Compute the metrics of the metric files.

    Returns:
        reward_ci95, and pass@k and maj@k for k above 1; then for each data source {source}/mean, {source}/mean_ci95,
        {source}/pass@k, {source}/maj@k.
    """
    *named, overall = summaries
    values = _metrics(overall, "")
    values.pop("mean", None)
    if "mean_ci95" in values:
        values = {"reward_ci95": values.pop("mean_ci95"), **values}
    for summary in named:
        values |= _metrics(summary, f"{summary.source}/")
    return values


def _metrics(summary: Summary, prefix: str) -> dict[str, float]:
    named = {"mean": summary.mean} | {
        f"{name}@{k}": value
        for name, of_k in (("pass", summary.pass_at), ("maj", summary.maj_at))
        for k, value in of_k.items()
        if k > 1
    }
    values = {f"{prefix}{name}": value.mean for name, value in named.items() if value is not None}
    if summary.mean is not None and summary.mean.ci95 is not None:
        values[f"{prefix}mean_ci95"] = summary.mean.ci95
    return values


def as_json(summary: Summary) -> dict[str, Any]:
    """Convert a summary to JSON values with keys such as "pass@4"."""
    values = {name: value for name, value in asdict(summary).items() if name != "source"}
    values |= {f"pass@{k}": value for k, value in values.pop("pass_at").items()}
    values |= {f"maj@{k}": value for k, value in values.pop("maj_at").items()}
    return values


def table(summaries: Sequence[Summary], title: str) -> Table:
    """Make a table for the console; after ± are half widths of 95% confidence intervals."""
    ks = list(dict.fromkeys(k for summary in summaries for k in summary.pass_at))
    votes = list(dict.fromkeys(k for summary in summaries for k in summary.maj_at))
    columns = [f"pass@{k}" for k in ks] + [f"maj@{k}" for k in votes]
    result = Table(title=escape(title), title_justify="left")
    for column in ("source", *columns, "mean ± 95% CI", "tokens", "truncated", "failed", "prompts", "n"):
        result.add_column(column, no_wrap=True, justify="left" if column == "source" else "right")
    for summary in summaries[:1] if len(summaries) == 2 else summaries:
        shares = [percent(summary.pass_at.get(k)) for k in ks] + [percent(summary.maj_at.get(k)) for k in votes]
        result.add_row(escape(summary.source) or "all", *shares, *_plain(summary))
    return result


def percent(value: Estimate | None) -> str:
    """Write an estimate: 50.0% ± 9.8."""
    if value is None:
        return "-"
    return f"{value.mean:.1%}" + ("" if value.ci95 is None else f" ± {100 * value.ci95:.1f}")


def number(value: Estimate | None) -> str:
    """Write an estimate: 0.500 ± 0.098."""
    if value is None:
        return "-"
    return f"{value.mean:.3f}" + ("" if value.ci95 is None else f" ± {value.ci95:.3f}")


def _plain(summary: Summary) -> Iterator[str]:
    yield number(summary.mean)
    yield f"{summary.length:.1f}"
    yield f"{summary.truncated:.1%}"
    yield str(summary.failed)
    yield str(summary.prompts)
    yield f"{summary.responses / summary.prompts:g}"
