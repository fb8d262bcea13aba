"""Scored responses as numbers: per data source and over all prompts. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.markup import escape
from rich.table import Table

from megarl.evaluation.records import Record, by_prompt
from megarl.evaluation.statistics import Estimate, estimate, majority_at_k, pass_at_k, powers_of_two

MOST_SOURCES = 64
"""Data sources with numbers of their own: a column that is different in every row names none."""


@dataclass(frozen=True, kw_only=True)
class Summary:
    """Of one data source. A response whose scoring failed counts only in `failed`, `length` and `truncated`.

    Attributes:
        source: empty for all prompts together.
        responses: to its `prompts`.
        failed: responses without a score.
        mean: the score, a prompt's being the mean over its responses (mean@n).
        pass_at: k -> pass@k, over the prompts with k scores or more.
        maj_at: k -> maj@k, over the same prompts.
        length: tokens per response.
        truncated: share of responses that were cut off at their greatest length.
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
    """One summary per data source that has a name, in the order in which they come first, and at last that of all.

    Args:
        ks: of pass@k and maj@k; default powers of two up to the number of samples per prompt.
    """
    chosen = ks or powers_of_two(max(map(len, by_prompt(records).values())))
    of_source: dict[str, list[Record]] = {}
    for record in records:
        of_source.setdefault(record.source, []).append(record)
    if len(of_source) > MOST_SOURCES:
        of_source = {}
    named = [_summary(name, own, chosen) for name, own in of_source.items() if name]
    return [*named, _summary("", records, chosen)]


def _summary(source: str, records: Sequence[Record], ks: Sequence[int]) -> Summary:
    prompts = by_prompt(records)
    scored = [own for r in prompts.values() if (own := [one for one in r if one.score is not None])]
    means = [sum(one.score or 0.0 for one in own) / len(own) for own in scored]
    pass_at = {k: [pass_at_k(len(own), sum(r.right for r in own), k) for own in scored if len(own) >= k] for k in ks}
    maj_at = {k: [_majority(own, k) for own in scored if len(own) >= k] for k in ks if k > 1}
    return Summary(
        source=source,
        prompts=len(prompts),
        responses=len(records),
        failed=sum(one.score is None for one in records),
        mean=estimate(means),
        pass_at={k: found for k, values in pass_at.items() if (found := estimate(values))},
        maj_at={k: found for k, values in maj_at.items() if (found := estimate(values))},
        length=sum(one.tokens for one in records) / len(records),
        truncated=sum(one.finish == "length" for one in records) / len(records),
    )


def _majority(records: Sequence[Record], k: int) -> float:
    return majority_at_k([one.vote for one in records], [float(one.right) for one in records], k)


def metrics(summaries: Sequence[Summary]) -> dict[str, float]:
    """For the metric files: reward_ci95, and of several samples pass@k and maj@k of k above 1; then the same of each
    data source, with its mean score: {source}/mean, {source}/mean_ci95, {source}/pass@k, {source}/maj@k.
    """
    *named, overall = summaries
    found = _metrics(overall, "")
    found.pop("mean", None)
    if "mean_ci95" in found:
        found = {"reward_ci95": found.pop("mean_ci95"), **found}
    for summary in named:
        found |= _metrics(summary, f"{summary.source}/")
    return found


def _metrics(summary: Summary, prefix: str) -> dict[str, float]:
    named = {"mean": summary.mean} | {
        f"{name}@{k}": value
        for name, of_k in (("pass", summary.pass_at), ("maj", summary.maj_at))
        for k, value in of_k.items()
        if k > 1
    }
    found = {f"{prefix}{name}": value.mean for name, value in named.items() if value is not None}
    if summary.mean is not None and summary.mean.ci95 is not None:
        found[f"{prefix}mean_ci95"] = summary.mean.ci95
    return found


def as_json(summary: Summary) -> dict[str, Any]:
    """With keys such as "pass@4"."""
    values = {name: value for name, value in asdict(summary).items() if name != "source"}
    values |= {f"pass@{k}": one for k, one in values.pop("pass_at").items()}
    values |= {f"maj@{k}": one for k, one in values.pop("maj_at").items()}
    return values


def table(summaries: Sequence[Summary], title: str) -> Table:
    """For the console; half widths of 95% confidence intervals after ±."""
    ks = list(dict.fromkeys(k for summary in summaries for k in summary.pass_at))
    votes = list(dict.fromkeys(k for summary in summaries for k in summary.maj_at))
    columns = [f"pass@{k}" for k in ks] + [f"maj@{k}" for k in votes]
    made = Table(title=escape(title), title_justify="left")
    for column in ("source", *columns, "mean ± 95% CI", "tokens", "truncated", "failed", "prompts", "n"):
        made.add_column(column, no_wrap=True, justify="left" if column == "source" else "right")
    for summary in summaries[:1] if len(summaries) == 2 else summaries:
        shares = [percent(summary.pass_at.get(k)) for k in ks] + [percent(summary.maj_at.get(k)) for k in votes]
        made.add_row(escape(summary.source) or "all", *shares, *_plain(summary))
    return made


def percent(value: Estimate | None) -> str:
    """50.0% ± 9.8"""
    if value is None:
        return "-"
    return f"{value.mean:.1%}" + ("" if value.ci95 is None else f" ± {100 * value.ci95:.1f}")


def number(value: Estimate | None) -> str:
    """0.500 ± 0.098"""
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
