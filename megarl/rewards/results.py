"""Turns what a reward function returned or raised into a score, or into words for what is wrong. Torch-free."""

from __future__ import annotations

import math
import os
import re
import struct
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from megarl.workers.frames import cut, frames_of

_FOLDER = os.path.dirname(os.path.abspath(__file__))
_NAMES = ("results", "call", "registry", "worker", "supervisor", "in_rank")
FRAMEWORK = frozenset(os.path.join(_FOLDER, f"{name}.py") for name in _NAMES)
"""Files whose frames are left out of what is shown of a call."""
_METRIC = re.compile(r"[A-Za-z0-9_.\-]{1,64}")
_METRICS = 64  # of one score
_TAKEN = {"mean", "accuracy", "failed", "retried", "greedy", "kl", "overlong_penalty", "part", "source"}


class RewardError(RuntimeError):
    """Raised where responses have no score; the message names reward, row and response, and shows the user's frames.

    Attributes:
        rank: where that was seen.
        everywhere: it is raised on every rank alike, and the models are in step.
    """

    def __init__(self, message: str, *, rank: int = 0, everywhere: bool = True) -> None:
        super().__init__(message)
        self.rank, self.everywhere = rank, everywhere


@dataclass(frozen=True, kw_only=True)
class Response:
    """Holds a response to be scored.

    Attributes:
        text: the decoded response.
        tokens: how many it has.
        finish_reason: "stop" or "length".
        prompt: what it answers, as the row has it: text or messages.
    """

    text: str
    tokens: int = 0
    finish_reason: str = "stop"
    prompt: Any = None


@dataclass(frozen=True, kw_only=True)
class CallResult:
    """Holds the score that one call of a reward function gave, or what is wrong; JSON values.

    Attributes:
        score: None if something is wrong.
        metrics: further numbers that the function returned, by name.
        wrong: "raised ...", "returned ...", "took longer than ...": a predicate to the reward's name.
        frames: where in the user's code it happened, as in a traceback; empty for a value that is no score.
        applies: false: the function says that the response is not its own to score; its score of 0 counts for nothing.
    """

    score: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    wrong: str = ""
    frames: str = ""
    applies: bool = True


@dataclass(frozen=True, kw_only=True)
class Scored:
    """Holds a response's score.

    Attributes:
        score: the weighted sum over the parts.
        parts: score of each part, by label; a reward without parts has one, whose label is empty.
        metrics: further numbers of the parts, as `name` or `part/label/name`.
        seconds: that each call took.
        retried: further tries that there were.
    """

    score: float
    parts: Mapping[str, float] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    seconds: tuple[float, ...] = field(default=(), compare=False)
    retried: int = 0


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Says why a response has no score.

    Attributes:
        reason: one line.
        frames: where in the user's code it happened, as in a traceback; empty for a value that is no score.
        left_out: nothing failed: no function says that the response is its own to score.
        seconds, retried: as `Scored` has them.
    """

    reason: str
    frames: str = ""
    left_out: bool = False
    seconds: tuple[float, ...] = field(default=(), compare=False)
    retried: int = field(default=0, compare=False)

    def __str__(self) -> str:
        return f"{self.reason}\n{self.frames}".rstrip()


class NoScore(Exception):
    """Raised for a value that is no score; the message is a predicate: "returned ..."."""


NOT_APPLICABLE = object()
"""In a score's place: the response is not the function's to score."""


def result_of(call: Callable[[], Any], *failures: type[BaseException]) -> CallResult:
    """Call a function, and read its score.

    Args:
        failures: the exceptions that are the user's; others are raised.
    """
    try:
        return result_of_value(call())
    except failures as e:  # a user's function can fail in any way
        return result_of_error(e)


def result_of_value(value: Any) -> CallResult:
    """Read a number, or a mapping with "score" and further numbers."""
    if value is NOT_APPLICABLE:
        return CallResult(score=0.0, applies=False)
    try:
        if not isinstance(value, Mapping):
            return CallResult(score=number(value))
        if "score" not in value:
            raise NoScore(f'returned {shown(value)}, a {type(value).__name__} without "score"')
        if len(value) > _METRICS:
            raise NoScore(f"returned {len(value)} numbers; there may be {_METRICS}")
        return CallResult(
            score=number(value["score"], "returned score: "),
            metrics={_name(key): number(value[key], f"returned {key}: ") for key in value if key != "score"},
        )
    except NoScore as e:
        return result_of_error(e)


def result_of_error(error: BaseException) -> CallResult:
    """Describe an exception that left the user's function, or that says what is wrong with its value."""
    if isinstance(error, NoScore):
        return CallResult(wrong=str(error))
    try:
        lines = traceback.TracebackException(type(error), error, None).format_exception_only()
        text = " ".join("".join(lines)[:10_000].split())
    except Exception:  # its own __str__ fails, in a way that traceback does not expect
        text = type(error).__name__
    return CallResult(wrong=f"raised {cut(text)}", frames=frames_of(error.__traceback__, FRAMEWORK))


def too_late(timeout: float, frames: str = "") -> CallResult:
    return CallResult(wrong=f"took longer than reward.timeout = {timeout:g} s", frames=frames)


def _name(key: Any) -> str:
    if not isinstance(key, str) or not _METRIC.fullmatch(key):
        raise NoScore(f"returned {shown(key)} as a number's name; use letters, digits, '_', '.' and '-'")
    if key in _TAKEN or key.startswith("latency_"):
        raise NoScore(f"returned a number called {key!r}, which is a metric of the run's own")
    return key


def number(value: Any, verb: str = "returned ") -> float:
    """Read a number of Python's, numpy's or torch's that user's code gave; raises NoScore unless float32 holds it."""
    if not isinstance(value, bool | int | float) and not _is_number_of_a_library(value):
        raise NoScore(f"{verb}{shown(value)}, a {type(value).__name__}, and not one number")
    try:
        return finite(float(value), verb)
    except OverflowError as e:  # a whole number of more than 308 digits
        raise NoScore(f"{verb}a number that is too large for float32") from e


def finite(number: float, verb: str) -> float:
    """Return the number as it is; raises NoScore unless float32 holds it."""
    if not math.isfinite(number):
        raise NoScore(f"{verb}{number}, which is not finite")
    try:
        struct.pack("<f", number)
    except OverflowError as e:
        raise NoScore(f"{verb}{number:g}, which is too large for float32") from e
    return number


def _is_number_of_a_library(value: Any) -> bool:
    """Tell whether a value is a scalar of numpy or torch; a library that is not imported here has made no value."""
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    if numpy is not None and isinstance(value, (numpy.bool_, numpy.integer, numpy.floating)):
        return True
    return torch is not None and isinstance(value, torch.Tensor) and value.ndim == 0 and not value.is_complex()


def shown(value: Any) -> str:
    """Write down a value, cut; a text of a gigabyte is cut before."""
    if isinstance(value, str | bytes):
        value = value[:300]
    try:
        return cut(repr(value))
    except Exception as e:
        return f"a value whose repr raises {type(e).__name__}"
