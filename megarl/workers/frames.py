"""Shows where in a user's code a call has failed or hangs, as a traceback without the frames of the caller."""

from __future__ import annotations

import os
import re
import traceback
from collections.abc import Container, Sequence
from types import TracebackType
from typing import Any

_WORKERS = os.path.dirname(os.path.abspath(__file__))
_FRAMES = 12  # of a traceback, at either end
_LENGTH = 20_000  # characters: a line of source can have any length
_DUMPED = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)


def frames_of(error: TracebackType | None, hidden: Container[str]) -> str:
    """Format the part of a traceback that begins in the user's function and ends where the exception came from.

    Args:
        hidden: paths of files whose frames are the caller's; those of this package are hidden, too.
    """
    return _formatted(traceback.extract_tb(error), hidden)


def frames_of_dump(dump: str, hidden: Container[str]) -> str:
    """Format what `faulthandler` wrote, which has the most recent call first, and no source."""
    calls = reversed(_DUMPED.findall(dump))
    frames = [traceback.FrameSummary(name, int(line), function) for name, line, function in calls]
    return _formatted([frame for frame in frames if frame.filename != "<string>"], hidden)


def frames_of_coroutine(coroutine: Any, hidden: Container[str]) -> str:
    """Format where a coroutine waits."""
    frames = []
    while (frame := getattr(coroutine, "cr_frame", None)) is not None:
        frames.append(traceback.FrameSummary(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
        coroutine = coroutine.cr_await
    return _formatted(frames, hidden)


def cut(text: str, length: int = 200) -> str:
    return text if len(text) <= length else f"{text[:length]}..."


def _formatted(stack: Sequence[traceback.FrameSummary], hidden: Container[str]) -> str:
    def is_shown(path: str) -> bool:
        return path not in hidden and os.path.dirname(path) != _WORKERS

    lines = traceback.format_list([frame for frame in stack if is_shown(os.path.abspath(frame.filename))])
    if len(lines) > 2 * _FRAMES:
        lines = [*lines[:_FRAMES], f"  ... {len(lines) - 2 * _FRAMES} more\n", *lines[-_FRAMES:]]
    return cut("".join(lines).rstrip(), _LENGTH)
