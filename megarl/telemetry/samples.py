"""Sample rollouts of a step, as text that a person reads."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace

from megarl.telemetry.lines import rewrite

_ALWAYS = ("prompt", "response", "answer", "reward")


@dataclass(frozen=True, kw_only=True)
class TokenColumns:
    """A text and numbers for each token of a response; None: not computed.

    Attributes:
        texts: joined they are the response, with its special tokens.
        logp: log-probability by the training layout, or else by the engine; nats.
        advantage: what the loss weighs the token with.
        gap: log-probability by the training layout less that by the engine, nats.
    """

    texts: list[str]
    logp: list[float | None] | None = None
    advantage: list[float | None] | None = None
    gap: list[float | None] | None = None


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One response, decoded, and its score; None where scoring failed.

    Attributes:
        turns: of an episode, who said what: ("policy", "<calc>6*7</calc>"), ("environment", "42") ...; None: the policy
            spoke once.
        error: why an episode failed.
        index: the prompt's position in its files.
        group: which drawing of the prompt it belongs to.
        sample: its number in the group.
        source: data source of the prompt.
        finish: "stop", or "length" for one that was cut off.
        length: tokens.
        turn_lengths: tokens of each turn.
        parts: of the score, by name.
        tokens: in the file as `tokens`, `logp`, `advantage`, `gap`.
    """

    prompt: str
    response: str
    answer: str
    reward: float | None
    turns: tuple[tuple[str, str], ...] | None = None
    error: str | None = None
    index: int | None = None
    group: int | None = None
    sample: int | None = None
    source: str | None = None
    finish: str | None = None
    length: int | None = None
    turn_lengths: tuple[int, ...] | None = None
    parts: Mapping[str, float] | None = None
    tokens: TokenColumns | None = None

    def with_tokens(self, tokens: TokenColumns) -> Sample:
        """The same with columns of its tokens."""
        return replace(self, tokens=tokens)

    def as_line(self) -> str:
        """As JSON, without what is not known."""
        shown = {field.name: getattr(self, field.name) for field in fields(self)}
        del shown["tokens"]
        if (columns := self.tokens) is not None:
            shown |= {"tokens": columns.texts, "logp": columns.logp}
            shown |= {"advantage": columns.advantage, "gap": columns.gap}
        known = {key: value for key, value in shown.items() if key in _ALWAYS or value is not None}
        return json.dumps(known, ensure_ascii=False) + "\n"


def chosen(groups: Sequence[Sequence[int]], wanted: int) -> list[int]:
    """Places of the rollouts that are shown, group by group.

    Whole groups are, evenly spread over all of them, since the responses to one prompt are compared with each other.
    The last one may be cut: 4 of each of 16 groups and 10 wanted give groups 0, 5 and half of 10.

    Args:
        groups: places of each group's rollouts.
        wanted: how many; -1: all.
    """
    if wanted < 0:
        return [place for group in groups for place in group]
    mean = max(1, sum(map(len, groups)) // max(1, len(groups)))
    several = max(1, min(len(groups), -(-wanted // mean)))
    every = max(1, len(groups) // several)
    order = [*range(0, every * several, every)] + [i for i in range(len(groups)) if i % every or i >= every * several]
    return [place for i in order if i < len(groups) for place in groups[i]][:wanted]


def write_samples(run_dir: str, step: int, samples: Iterable[Sample]) -> str:
    """Write `rollouts/step_000012.jsonl` below `run_dir`, one sample a line; returns the file's path.

    A file of that name is replaced in one move.
    """
    path = os.path.join(run_dir, "rollouts", f"step_{step:06d}.jsonl")
    os.makedirs(os.path.dirname(path), exist_ok=True)
    rewrite(path, "".join(sample.as_line() for sample in samples).encode("utf-8", "replace"))
    return path
