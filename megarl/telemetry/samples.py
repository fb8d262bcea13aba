"""Writes sample rollouts of a step as text for people."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace

from megarl.telemetry.lines import rewrite

_ALWAYS = ("prompt", "response", "answer", "reward")


@dataclass(frozen=True, kw_only=True)
class TokenColumns:
    """Holds the text and numbers of each token of a response; None: not computed.

    Attributes:
        texts: the tokens' texts; joined they are the response with its special tokens.
        logp: log-probability by the training layout, or else by the engine; nats.
        advantage: the token's weight in the loss.
        gap: log-probability by the training layout less that by the engine, nats.
    """

    texts: list[str]
    logp: list[float | None] | None = None
    advantage: list[float | None] | None = None
    gap: list[float | None] | None = None


@dataclass(frozen=True, kw_only=True)
class Sample:
    """Holds a decoded response with its score.

    Attributes:
        reward: the score; None: scoring failed.
        turns: an episode's (speaker, text): ("policy", "<calc>6*7</calc>"), ("environment", "42") ...; None: the policy
            spoke once.
        error: why an episode failed.
        index: the prompt's position in its files.
        group: number of the group of responses to one prompt.
        sample: the response's number in its group.
        source: data source of the prompt.
        finish: "stop", or "length" for a response that was cut off.
        length: tokens of the response.
        turn_lengths: tokens of each turn.
        parts: the score's parts by name.
        tokens: written as the columns `tokens`, `logp`, `advantage`, `gap`.
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
        """Return the sample with columns for its tokens."""
        return replace(self, tokens=tokens)

    def as_line(self) -> str:
        """Write the sample as a line of JSON, without fields that are None."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        del values["tokens"]
        if (columns := self.tokens) is not None:
            values |= {"tokens": columns.texts, "logp": columns.logp}
            values |= {"advantage": columns.advantage, "gap": columns.gap}
        row = {key: value for key, value in values.items() if key in _ALWAYS or value is not None}
        return json.dumps(row, ensure_ascii=False) + "\n"


def chosen(groups: Sequence[Sequence[int]], wanted: int) -> list[int]:
    """Choose the rollouts that are shown, group by group; returns their places.

    Whole groups are chosen, because people compare the responses to one prompt, and evenly over all groups. The last
    group may be cut: of 16 groups with 4 rollouts each, `wanted=10` gives groups 0, 5 and half of 10.

    Args:
        groups: places of each group's rollouts.
        wanted: number of rollouts; -1: all.
    """
    if wanted < 0:
        return [place for group in groups for place in group]
    mean = max(1, sum(map(len, groups)) // max(1, len(groups)))
    several = max(1, min(len(groups), -(-wanted // mean)))
    every = max(1, len(groups) // several)
    order = [*range(0, every * several, every)] + [i for i in range(len(groups)) if i % every or i >= every * several]
    return [place for i in order if i < len(groups) for place in groups[i]][:wanted]


def write_samples(run_dir: str, step: int, samples: Iterable[Sample]) -> str:
    """Write samples to `rollouts/step_000012.jsonl` below `run_dir`, one a line; returns the file's path.

    A file of that name is replaced in one move.
    """
    path = os.path.join(run_dir, "rollouts", f"step_{step:06d}.jsonl")
    os.makedirs(os.path.dirname(path), exist_ok=True)
    rewrite(path, "".join(sample.as_line() for sample in samples).encode("utf-8", "replace"))
    return path
