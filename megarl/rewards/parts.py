"""Loads the functions that a score is made of, as the configuration names them, and combines their results."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, Literal

from megarl.config.reward import BY_MODEL, RewardConfig
from megarl.own_code import is_async
from megarl.rewards.call import check_arguments, takes_lists
from megarl.rewards.registry import Reward, RowCheck, is_registered, load_reward
from megarl.rewards.results import CallResult, Failure, NoScore, Scored, finite, shown
from megarl.workers.frames import cut

Scorers = tuple[tuple[str, tuple[str, ...], str], ...]
"""Of named functions: (`reward.name`, the data sources that it scores; empty: all, JSON of its arguments)."""

Kind = Literal["plain", "batch", "async"]
_LABEL = re.compile(r"[A-Za-z0-9_.\-]{1,64}")


@dataclass(frozen=True, kw_only=True)
class Part:
    """Holds a function, or a reward model, with its weight in the score.

    Attributes:
        label: its name in the metrics; empty for a reward without parts.
        args: what the function is given beside response and row.
        data_sources: rows of these it scores; empty: all rows.
        kind: a function of one response, of lists, or an `async def`.
    """

    label: str = ""
    reward: Reward
    weight: float = 1.0
    args: Mapping[str, Any] = field(default_factory=dict)
    data_sources: tuple[str, ...] = ()
    kind: Kind = "plain"

    @property
    def key(self) -> str:
        """Return the configuration key of the function's name."""
        return f"reward.parts.{self.label}.name" if self.label else "reward.name"

    @property
    def by_model(self) -> bool:
        """Tell whether a reward model gives the part's score, and no function."""
        return self.reward.name == BY_MODEL

    def applies_to(self, source: str) -> bool:
        return not self.data_sources or source in self.data_sources


def functions_of(parts: Sequence[Part]) -> tuple[Part, ...]:
    """Return the parts that a reward model does not give."""
    return tuple(part for part in parts if not part.by_model)


def _asked_of_functions(response: str, row: Mapping[str, Any]) -> float:
    raise AssertionError("a reward model is asked in another way")


_MODEL = Reward(name=BY_MODEL, function=_asked_of_functions, named=True)


def scorers_of(parts: Sequence[Part]) -> Scorers:
    """Return what rows are checked against; functions that have no name check nothing."""
    return tuple(
        (part.reward.name, part.data_sources, json.dumps(dict(part.args), sort_keys=True, default=repr))
        for part in parts
        if part.reward.named
    )


def refusal_of(row: Mapping[str, Any], source: str, scorers: Scorers) -> str:
    """Say why a response to a row could not be scored, in words that follow the row's place; empty if it can be."""
    if not scorers:
        return ""
    applying = [(name, args) for name, sources, args in scorers if not sources or source in sources]
    if not applying:
        return f"the row has the data source {source!r}, and no part of reward.parts scores it"
    for name, args in applying:
        if (check_row := _row_check(name, args)) is not None:
            try:
                check_row(row)
            except ValueError as e:
                return f"reward {name} {e}"
    return ""


@cache
def _row_check(name: str, args: str) -> RowCheck | None:
    check_row = None if name == BY_MODEL else load_reward(name).check_row
    return None if check_row is None else partial(check_row, **json.loads(args))


def parts_of(settings: RewardConfig, given: Reward | None = None) -> tuple[Part, ...]:
    """Return the parts that score a response.

    Args:
        given: a program's own function, instead of `reward.name`.

    Raises:
        ValueError: a function, an argument or a weight is wrong; one line that says what to change.
    """
    if settings.parts:
        if given is not None or settings.name != type(settings)().name:
            raise ValueError(
                f"reward.parts is set, and {given.name if given else f'reward.name = {settings.name}'} would not be "
                "used; leave one of the two off"
            )
        return _several(settings)
    if given is None and settings.name == BY_MODEL:
        if settings.args:
            raise ValueError("reward.args are a function's, and reward.name=model is none; leave them off")
        return (Part(reward=_MODEL),)
    reward = given or load_reward(settings.name)
    _check_json(settings.args, "reward.args")
    check_arguments(reward, settings.args, "reward.args")
    return (Part(reward=reward, args=settings.args, kind=_kind(reward, settings)),)


def _several(settings: RewardConfig) -> tuple[Part, ...]:
    if settings.args:
        raise ValueError("reward.args belong to reward.name; with reward.parts, set reward.parts.<label>.args")
    if settings.batch_size is not None:
        raise ValueError("reward.batch_size hands lists to the function of reward.name; with reward.parts, unset it")
    if not any(part.weight for part in settings.parts.values()):
        raise ValueError("reward.parts: every weight is 0, and so is every score; set one to another number")
    if (models := settings.names.count(BY_MODEL)) > 1:
        raise ValueError(f"reward.parts: {models} parts have the name model, and there is one reward model")
    if set(settings.names) == {BY_MODEL}:
        raise ValueError("reward.parts: a reward model without a function beside it is reward.name=model without parts")
    return tuple(_part(label, part) for label, part in settings.parts.items())


def _part(label: str, settings: Any) -> Part:
    if not _LABEL.fullmatch(label):
        raise ValueError(f"reward.parts: {shown(label)} is no label; use letters, digits, '_', '.' and '-'")
    key = f"reward.parts.{label}"
    if settings.name == BY_MODEL:
        if settings.args:
            raise ValueError(f"{key}.args are a function's, and a reward model is none; leave them off")
        reward = _MODEL
    else:
        reward = _function(settings, key)
    return Part(
        label=label,
        reward=reward,
        weight=settings.weight,
        args=settings.args,
        data_sources=tuple(settings.data_sources),
        kind="async" if is_async(reward.function) else "plain",
    )


def _function(settings: Any, key: str) -> Reward:
    try:
        reward = load_reward(settings.name)
    except ValueError as e:
        raise ValueError(f"{key}.name{str(e).removeprefix('reward.name')}") from e
    _check_json(settings.args, f"{key}.args")
    check_arguments(reward, settings.args, f"{key}.args")
    return reward


def _kind(reward: Reward, settings: RewardConfig) -> Kind:
    if (lists := takes_lists(reward.function)) is not None and lists != (settings.batch_size is not None):
        what = "lists: set reward.batch_size, to 64 say" if lists else "one response at a time: unset reward.batch_size"
        raise ValueError(f"reward {reward.name} takes {what}")
    if settings.batch_size is None:
        return "async" if is_async(reward.function) else "plain"
    if is_async(reward.function):
        raise ValueError(
            f"reward.batch_size hands lists to a function; {reward.name} is an async def, of which up to "
            "reward.concurrency run at a time: unset reward.batch_size"
        )
    if is_registered(reward.name):
        raise ValueError(f"reward.batch_size: {reward.name} scores one response at a time; unset it")
    return "batch"


def _check_json(args: Mapping[str, Any], key: str) -> None:
    for name, value in args.items():
        try:
            same = json.loads(json.dumps(value)) == value
        except (TypeError, ValueError):
            same = False
        if not same:
            raise ValueError(f"{key}: {shown(name)} is {shown(value)}, and not a value that JSON has")


def combined(
    parts: Sequence[Part],
    results: Sequence[CallResult],
    *,
    text: str,
    row: str,
    seconds: tuple[float, ...],
    retried: int,
) -> Scored | Failure:
    """Combine the results of the parts that apply to a response: its score, or why it has none.

    Args:
        text: the response.
        row: how messages name its row.
    """
    at = f"; row {row}, response {cut(repr(text[:300]))}"
    for part, result in zip(parts, results, strict=True):
        if result.score is None:
            reason = f"{part.key} = {part.reward.name} {result.wrong}{at}"
            return Failure(reason=reason, frames=result.frames, seconds=seconds, retried=retried)
    pairs = [(part, result) for part, result in zip(parts, results, strict=True) if result.applies]
    scores = {part.label: result.score for part, result in pairs if result.score is not None}
    if not scores:
        subject = f"{parts[0].key} = {parts[0].reward.name}" if len(parts) == 1 else "reward.parts"
        return Failure(reason=f"{subject} returned None{at}", left_out=True, seconds=seconds, retried=retried)
    try:
        total = finite(sum(part.weight * scores[part.label] for part, _ in pairs), "add up to ")
    except NoScore as e:
        return Failure(reason=f"reward.parts {e}{at}", seconds=seconds, retried=retried)
    metrics = {
        f"part/{part.label}/{name}" if part.label else name: value
        for part, result in pairs
        for name, value in result.metrics.items()
    }
    return Scored(score=total, parts=scores, metrics=metrics, seconds=seconds, retried=retried)
