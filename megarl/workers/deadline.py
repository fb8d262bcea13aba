"""Limits the time of calls that know nothing of it."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TypeVar

T = TypeVar("T")
_AGAIN = 0.5  # seconds until the next try at code that has caught the exception


_ends: list[float] = []


@contextmanager
def ends_within(seconds: float) -> Iterator[None]:
    """Let `seconds_left` know, inside, that the call is ended from outside after a while, perhaps with the process."""
    _ends.append(time.monotonic() + seconds)
    try:
        yield
    finally:
        _ends.pop()


def seconds_left() -> float:
    """Return the seconds until the present call is ended from outside; infinity if nobody does that."""
    return min(_ends, default=math.inf) - time.monotonic()


class DeadlinePassed(BaseException):
    """A call took too long. No `Exception`: `except Exception` in the call must not stop it."""


def call_within(seconds: float, call: Callable[[], T]) -> T:
    """Call a function, and stop it after a while by an exception between two of its bytecodes.

    Python code, regular expressions and waiting (for a process, a lock, a socket) are stopped; a C extension only when
    it returns. A call that sets SIGALRM for itself replaces the deadline by its own. Outside the main thread, where no
    signal arrives, there is no deadline.

    Raises:
        DeadlinePassed: the call took longer, even if it caught the exception and returned something.
    """
    if threading.current_thread() is not threading.main_thread():
        return call()
    running, passed = True, False

    def interrupt(signum: int, frame: FrameType | None) -> None:
        nonlocal passed
        passed = True
        if running:
            raise DeadlinePassed

    start = time.monotonic()
    handler = signal.signal(signal.SIGALRM, interrupt)
    before, every = signal.setitimer(signal.ITIMER_REAL, seconds, _AGAIN)
    try:
        try:
            with ends_within(seconds):
                result = call()
        finally:
            running = False  # a signal between here and the next lines must not leave them undone
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL if handler is None else handler)
        if before:  # somebody else's alarm goes on
            signal.setitimer(signal.ITIMER_REAL, max(before - (time.monotonic() - start), 1e-6), every)
    if passed:
        raise DeadlinePassed
    return result
