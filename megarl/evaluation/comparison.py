"""Compares two evaluations over the same prompts, paired by prompt. Torch-free."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.markup import escape
from rich.table import Table

from megarl.evaluation.folder import Finished, write_json
from megarl.evaluation.records import Record, by_prompt, write_whole
from megarl.evaluation.statistics import Paired, paired
from megarl.evaluation.summary import by_source, number, percent

COMPARE_FILE = "compare.json"
CHANGES_FILE = "changes.jsonl"


@dataclass(frozen=True, kw_only=True)
class Both:
    """Holds the scored responses of A and of B to one prompt."""

    a: Sequence[Record]
    b: Sequence[Record]

    @property
    def source(self) -> str:
        return self.a[0].source

    @property
    def scores(self) -> tuple[float, float]:
        """Return the mean scores of A and of B."""
        return _mean([r.score or 0.0 for r in self.a]), _mean([r.score or 0.0 for r in self.b])

    @property
    def shares(self) -> tuple[float, float]:
        """Return the shares of right responses of A and of B."""
        return _mean([float(r.right) for r in self.a]), _mean([float(r.right) for r in self.b])


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Compares A and B over one data source.

    Attributes:
        source: the data source; empty for all prompts together.
        prompts: number of prompts that both have scores for.
        mean: A's score minus B's.
        accuracy: A's pass@1, the share of right responses, minus B's.
        scores: mean scores of A and of B.
        shares: pass@1 of A and of B.
    """

    source: str
    prompts: int
    mean: Paired
    accuracy: Paired
    scores: tuple[float, float]
    shares: tuple[float, float]


def check_same_prompts(a: Finished, b: Finished) -> None:
    """Raise ValueError, naming the first difference, unless both answer the same prompts."""
    prompts_a, prompts_b = _prompts(a.records), _prompts(b.records)
    for index in sorted(prompts_a.keys() | prompts_b.keys()):
        prompt_a, prompt_b = prompts_a.get(index), prompts_b.get(index)
        if prompt_a == prompt_b:
            continue
        if prompt_a is None or prompt_b is None:
            lacks, has = (a, b) if prompt_a is None else (b, a)
            raise ValueError(
                f"'{lacks.folder}' has no prompt {index}, and '{has.folder}' has: evaluate both on the same files"
            )
        field = next(
            name for name, x, y in zip(("text", "answer", "source"), prompt_a, prompt_b, strict=True) if x != y
        )
        raise ValueError(
            f"prompt {index} has another {field} in '{a.folder}' than in '{b.folder}': evaluate both on the same files"
        )


def differing_settings(a: Finished, b: Finished) -> list[str]:
    """Describe the settings that differ, such as sampling or reward; the model is not one of them."""
    names = [name for name in a.settings if name != "model"]
    return [f"{n} {a.settings[n]!r} and {b.settings.get(n)!r}" for n in names if a.settings[n] != b.settings.get(n)]


def pair(a: Finished, b: Finished) -> list[Both]:
    """Pair the prompts that both have scores for. Raises ValueError like `check_same_prompts`, or if there are none."""
    check_same_prompts(a, b)
    scored_a, scored_b = (by_prompt([r for r in side.records if r.score is not None]) for side in (a, b))
    pairs = [Both(a=records, b=scored_b[index]) for index, records in scored_a.items() if index in scored_b]
    if not pairs:
        raise ValueError(f"'{a.folder}' and '{b.folder}' have no prompt that both have scores for")
    return pairs


def compare_sources(prompts: Sequence[Both]) -> list[Comparison]:
    """Compare over each named data source, and last over all prompts."""
    return [*(_comparison(name, pairs) for name, pairs in by_source(prompts).items()), _comparison("", prompts)]


def _comparison(source: str, prompts: Sequence[Both]) -> Comparison:
    scores, shares = ([getattr(prompt, name) for prompt in prompts] for name in ("scores", "shares"))
    mean, accuracy = (paired([a for a, _ in pairs], [b for _, b in pairs]) for pairs in (scores, shares))
    assert mean is not None and accuracy is not None
    levels = {
        name: (_mean([a for a, _ in pairs]), _mean([b for _, b in pairs]))
        for name, pairs in (("scores", scores), ("shares", shares))
    }
    return Comparison(source=source, prompts=len(prompts), mean=mean, accuracy=accuracy, **levels)


def write_comparison(
    folder: str, a: Finished, b: Finished, prompts: Sequence[Both], comparisons: Sequence[Comparison]
) -> None:
    """Write compare.json, and changes.jsonl with the prompts whose scores differ, the largest differences first."""
    changes = sorted(
        (prompt for prompt in prompts if _gap(prompt)), key=lambda prompt: (-abs(_gap(prompt)), prompt.a[0].index)
    )
    lines = [json.dumps(_change(prompt), ensure_ascii=False) + "\n" for prompt in changes]
    write_whole(os.path.join(folder, CHANGES_FILE), lambda f: f.writelines(lines))
    *named, overall = comparisons
    values = {
        "a": {"folder": a.folder, **a.settings},
        "b": {"folder": b.folder, **b.settings},
        "all": _as_json(overall),
        "sources": {comparison.source: _as_json(comparison) for comparison in named},
    }
    write_json(os.path.join(folder, COMPARE_FILE), values)


def table(comparisons: Sequence[Comparison], title: str) -> Table:
    """Make a table for the console; after ± are half widths of 95% confidence intervals."""
    result = Table(title=escape(title), title_justify="left")
    of_mean = ("mean A", "mean B", "A - B ± 95% CI", "p", "A higher", "B higher")
    of_share = ("pass@1 A", "pass@1 B", "A - B ± 95% CI", "p")
    for column in ("source", *of_mean, *of_share, "prompts"):
        result.add_column(column, no_wrap=True, justify="left" if column == "source" else "right")
    for comparison in comparisons[:1] if len(comparisons) == 2 else comparisons:
        mean, accuracy = comparison.mean, comparison.accuracy
        result.add_row(
            escape(comparison.source) or "all",
            *(f"{value:.3f}" for value in comparison.scores),
            number(mean.difference),
            f"{mean.p:.2g}",
            str(mean.a_only),
            str(mean.b_only),
            *(f"{value:.1%}" for value in comparison.shares),
            percent(accuracy.difference),
            f"{accuracy.p:.2g}",
            str(comparison.prompts),
        )
    return result


def _prompts(records: Sequence[Record]) -> dict[int, tuple[str, str, str]]:
    return {record.index: (record.row, record.answer, record.source) for record in records}


def _as_json(comparison: Comparison) -> Mapping[str, Any]:
    (mean_a, mean_b), (share_a, share_b) = comparison.scores, comparison.shares
    mean = asdict(comparison.mean) | {"a": mean_a, "b": mean_b}
    share = asdict(comparison.accuracy) | {"a": share_a, "b": share_b}
    return {"prompts": comparison.prompts, "mean": mean, "pass@1": share}


def _gap(prompt: Both) -> float:
    a, b = prompt.scores
    return a - b


def _change(prompt: Both) -> Mapping[str, Any]:
    first, (a, b) = prompt.a[0], prompt.scores
    return {
        "difference": a - b,
        "source": prompt.source,
        "index": first.index,
        "prompt": first.prompt,
        "answer": first.answer,
        "a": [{"response": record.response, "score": record.score} for record in prompt.a],
        "b": [{"response": record.response, "score": record.score} for record in prompt.b],
    }


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
