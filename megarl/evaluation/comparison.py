"""Two evaluations over the same prompts, paired. Torch-free."""

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
from megarl.evaluation.summary import MOST_SOURCES, number, percent

COMPARE_FILE = "compare.json"
CHANGES_FILE = "changes.jsonl"


@dataclass(frozen=True, kw_only=True)
class Both:
    """A prompt and the responses of A and of B to it, those that have scores."""

    a: Sequence[Record]
    b: Sequence[Record]

    @property
    def source(self) -> str:
        return self.a[0].source

    @property
    def scores(self) -> tuple[float, float]:
        """Mean score of each."""
        return _mean([one.score or 0.0 for one in self.a]), _mean([one.score or 0.0 for one in self.b])

    @property
    def shares(self) -> tuple[float, float]:
        """Share of right responses of each."""
        return _mean([float(one.right) for one in self.a]), _mean([float(one.right) for one in self.b])


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Of one data source, A less B.

    Attributes:
        source: empty for all prompts together.
        prompts: that both have scores for.
        mean: of the score.
        accuracy: of pass@1, the share of right responses.
        scores, shares: the two of A and of B.
    """

    source: str
    prompts: int
    mean: Paired
    accuracy: Paired
    scores: tuple[float, float]
    shares: tuple[float, float]


def check_same_prompts(a: Finished, b: Finished) -> None:
    """Raises ValueError, naming the first difference, unless both answer the same prompts."""
    ours, theirs = _asked(a.records), _asked(b.records)
    for index in sorted(ours.keys() | theirs.keys()):
        one, other = ours.get(index), theirs.get(index)
        if one == other:
            continue
        if one is None or other is None:
            lacks, has = (a, b) if one is None else (b, a)
            raise ValueError(
                f"'{lacks.folder}' has no prompt {index}, and '{has.folder}' has: evaluate both on the same files"
            )
        what = next(name for name, x, y in zip(("text", "answer", "source"), one, other, strict=True) if x != y)
        raise ValueError(
            f"prompt {index} has another {what} in '{a.folder}' than in '{b.folder}': evaluate both on the same files"
        )


def differing_settings(a: Finished, b: Finished) -> list[str]:
    """What makes the two more than two models apart, in words: sampling, and what scored them."""
    names = [name for name in a.settings if name != "model"]
    return [f"{n} {a.settings[n]!r} and {b.settings.get(n)!r}" for n in names if a.settings[n] != b.settings.get(n)]


def pair(a: Finished, b: Finished) -> list[Both]:
    """The prompts that both have scores for; raises ValueError as `check_same_prompts`, or if there is none."""
    check_same_prompts(a, b)
    theirs = by_prompt([one for one in b.records if one.score is not None])
    ours = by_prompt([one for one in a.records if one.score is not None])
    found = [Both(a=own, b=theirs[index]) for index, own in ours.items() if index in theirs]
    if not found:
        raise ValueError(f"'{a.folder}' and '{b.folder}' have no prompt that both have scores for")
    return found


def compare_sources(prompts: Sequence[Both]) -> list[Comparison]:
    """One per data source that has a name, and at last that of all prompts."""
    of_source: dict[str, list[Both]] = {}
    for both in prompts:
        of_source.setdefault(both.source, []).append(both)
    if len(of_source) > MOST_SOURCES:
        of_source = {}
    named = [_comparison(name, own) for name, own in of_source.items() if name]
    return [*named, _comparison("", prompts)]


def _comparison(source: str, prompts: Sequence[Both]) -> Comparison:
    scores, shares = ([getattr(both, name) for both in prompts] for name in ("scores", "shares"))
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
    """compare.json, and changes.jsonl: the prompts whose score differs, the largest differences first."""
    changed = sorted((both for both in prompts if _gap(both)), key=lambda both: (-abs(_gap(both)), both.a[0].index))
    lines = [json.dumps(_change(both), ensure_ascii=False) + "\n" for both in changed]
    write_whole(os.path.join(folder, CHANGES_FILE), lambda f: f.writelines(lines))
    *named, overall = comparisons
    values = {
        "a": {"folder": a.folder, **a.settings},
        "b": {"folder": b.folder, **b.settings},
        "all": _as_json(overall),
        "sources": {one.source: _as_json(one) for one in named},
    }
    write_json(os.path.join(folder, COMPARE_FILE), values)


def table(comparisons: Sequence[Comparison], title: str) -> Table:
    """For the console; half widths of 95% confidence intervals after ±."""
    made = Table(title=escape(title), title_justify="left")
    of_mean = ("mean A", "mean B", "A - B ± 95% CI", "p", "A higher", "B higher")
    of_share = ("pass@1 A", "pass@1 B", "A - B ± 95% CI", "p")
    for column in ("source", *of_mean, *of_share, "prompts"):
        made.add_column(column, no_wrap=True, justify="left" if column == "source" else "right")
    for one in comparisons[:1] if len(comparisons) == 2 else comparisons:
        mean, accuracy = one.mean, one.accuracy
        means, shares = [f"{value:.3f}" for value in one.scores], [f"{value:.1%}" for value in one.shares]
        made.add_row(
            escape(one.source) or "all",
            *means,
            number(mean.difference),
            f"{mean.p:.2g}",
            str(mean.a_only),
            str(mean.b_only),
            *shares,
            percent(accuracy.difference),
            f"{accuracy.p:.2g}",
            str(one.prompts),
        )
    return made


def _asked(records: Sequence[Record]) -> dict[int, tuple[str, str, str]]:
    return {one.index: (one.row, one.answer, one.source) for one in records}


def _as_json(one: Comparison) -> Mapping[str, Any]:
    (mean_a, mean_b), (share_a, share_b) = one.scores, one.shares
    mean, share = asdict(one.mean) | {"a": mean_a, "b": mean_b}, asdict(one.accuracy) | {"a": share_a, "b": share_b}
    return {"prompts": one.prompts, "mean": mean, "pass@1": share}


def _gap(both: Both) -> float:
    a, b = both.scores
    return a - b


def _change(both: Both) -> Mapping[str, Any]:
    first, (a, b) = both.a[0], both.scores
    return {
        "difference": a - b,
        "source": both.source,
        "index": first.index,
        "prompt": first.prompt,
        "answer": first.answer,
        "a": [{"response": one.response, "score": one.score} for one in both.a],
        "b": [{"response": one.response, "score": one.score} for one in both.b],
    }


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
