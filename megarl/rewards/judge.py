"""Calls reward functions so that what they do wrong is said clearly, with the row and the response."""

from __future__ import annotations

import math
import os
import traceback
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import numpy as np
from torch import Tensor

from megarl.rewards import deadline, registry
from megarl.rewards.deadline import DeadlinePassed, call_within
from megarl.rewards.registry import Reward
from megarl.types import Prompt

_OURS = {os.path.abspath(file) for file in (__file__, registry.__file__, deadline.__file__)}
_FRAMES = 12  # of a traceback, at either end


class RewardError(RuntimeError):
    """Responses could not be scored; the message names reward, row and response, and shows the user's frames."""


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Why a response has no score.

    Attributes:
        reason: one line.
        frames: where in the user's code it happened, as in a traceback; empty for a value that is no score.
    """

    reason: str
    frames: str = ""

    def __str__(self) -> str:
        return f"{self.reason}\n{self.frames}".rstrip()


def judge(reward: Reward, response: str, prompt: Prompt, *, timeout: float) -> float | Failure:
    """The reward's score of one response, or why there is none.

    Args:
        timeout: seconds that the reward may take.
    """
    frames: TracebackType | None = None
    try:
        value = call_within(timeout, lambda: reward(response, prompt.row))
        return _as_score(value)
    except DeadlinePassed as e:
        wrong, frames = f"took longer than reward.timeout = {timeout:g} s", e.__traceback__
    except _NoScore as e:
        wrong = str(e)
    except (Exception, SystemExit) as e:  # a user's function can fail in any way
        said = traceback.TracebackException(type(e), e, None).format_exception_only()
        wrong, frames = f"raised {_cut(' '.join(''.join(said).split()))}", e.__traceback__
    row = prompt.source or f"row {prompt.index}"
    return Failure(
        reason=f"reward.name = {reward.name} {wrong}; row {row}, response {_cut(repr(response))}",
        frames=_users_frames(frames),
    )


class _NoScore(Exception):
    pass


def _as_score(value: Any) -> float:
    if not isinstance(value, bool | int | float | np.bool_ | np.integer | np.floating) and not (
        isinstance(value, Tensor) and value.ndim == 0 and not value.is_complex()
    ):
        raise _NoScore(f"returned {_cut(repr(value))}, a {type(value).__name__}, and not one number")
    try:
        number = float(value)
    except OverflowError as e:  # a whole number of more than 308 digits
        raise _NoScore("returned a number that is too large for float32") from e
    if not math.isfinite(number):
        raise _NoScore(f"returned {number}, which is not finite")
    with np.errstate(over="ignore"):
        if not np.isfinite(np.float32(number)):
            raise _NoScore(f"returned {number:g}, which is too large for float32")
    return number


def _users_frames(frames: TracebackType | None) -> str:
    """The part of a traceback that begins in the user's function and ends where the exception came from."""
    stack = traceback.extract_tb(frames)
    lines = traceback.format_list([frame for frame in stack if os.path.abspath(frame.filename) not in _OURS])
    if len(lines) > 2 * _FRAMES:
        lines = [*lines[:_FRAMES], f"  ... {len(lines) - 2 * _FRAMES} more\n", *lines[-_FRAMES:]]
    return "".join(lines).rstrip()


def _cut(text: str, length: int = 200) -> str:
    return text if len(text) <= length else f"{text[:length]}..."
