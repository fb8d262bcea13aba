"""Calls code that may take long, or never return, in threads."""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any

from megarl.rewards.results import RewardError
from megarl.workers.frames import frames_of

MOST_LEFT = 64
"""Most threads of this process that may hang in calls that took too long; with more, the process would fill with
threads."""

_left: set[_Call] = set()


@dataclass(frozen=True, kw_only=True)
class Answer:
    """Holds the result of a call.

    Attributes:
        key: names the call.
        value: the function's return value.
        error: why the function returned nothing; None: it returned.
        seconds: that the call took.
    """

    key: Any
    value: Any = None
    error: str | None = None
    seconds: float = 0.0


@dataclass(kw_only=True, eq=False)
class _Call:
    key: Any
    function: Callable[[], Any]
    began: float | None = None
    left: bool = False
    answered: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)


class Calls:
    """Runs calls in daemon threads, several at a time, in the order of `submit`.

    A call that takes too long is left behind with its thread, and another thread takes its place, up to `MOST_LEFT`
    of them: no thread can be ended from outside.

    Args:
        threads: how many run calls at most.
        timeout: seconds of a call, from its start.
    """

    def __init__(self, *, threads: int, timeout: float) -> None:
        self._most, self._timeout = threads, timeout
        self._waiting: SimpleQueue[_Call | None] = SimpleQueue()
        self._answers: SimpleQueue[tuple[_Call, Answer]] = SimpleQueue()
        self._threads = 0
        self._open: dict[_Call, None] = {}

    @property
    def open(self) -> int:
        """Count the calls without an answer."""
        return len(self._open)

    def submit(self, key: Any, function: Callable[[], Any]) -> None:
        """Call a function soon; `answers` returns its answer under the key."""
        call = _Call(key=key, function=function)
        self._open[call] = None
        self._waiting.put(call)
        if self._threads < min(self._most, len(self._open)):
            self._start()

    def answers(self, wait: float) -> list[Answer]:
        """Return the answers since the last time.

        Args:
            wait: seconds to wait for an answer, if there is none and a call is open.

        Raises:
            RewardError: too many calls hang.
        """
        answers = self._take(0.0)
        until = time.monotonic() + wait
        while not answers and self._open and (left := until - time.monotonic()) > 0:
            answers = self._take(min(left, self._next_end())) + self._late()
        return answers or self._late()

    def close(self) -> None:
        """End the threads: idle ones at once, the others after their call."""
        for _ in range(self._threads):
            self._waiting.put(None)

    def _take(self, wait: float) -> list[Answer]:
        answers: list[Answer] = []
        with suppress(Empty):
            while True:
                call, answer = self._answers.get(timeout=wait) if wait and not answers else self._answers.get_nowait()
                if self._open.pop(call, call) is None:
                    answers.append(answer)
        return answers

    def _next_end(self) -> float:
        """Compute the seconds until a call may have taken too long: from 0.01 to 1."""
        now = time.monotonic()
        ends = [call.began + self._timeout - now for call in self._open if call.began is not None]
        return min(1.0, max(0.01, min(ends, default=1.0)))

    def _late(self) -> list[Answer]:
        """Give up calls that took too long."""
        answers, now = [], time.monotonic()
        for call in tuple(self._open):
            if call.began is None or now - call.began <= self._timeout:
                continue
            with call.lock:
                if call.answered:
                    continue
                call.left = True
                _left.add(call)
            if len(_left) > MOST_LEFT:
                raise RewardError(
                    f"{len(_left)} calls of environments took longer than environment.timeout = {self._timeout:g} s "
                    f"and have not returned, each with a thread that cannot be ended: let step and reset end what they "
                    f"wait for, or raise environment.timeout",
                    everywhere=False,
                )
            del self._open[call]
            answers.append(
                Answer(
                    key=call.key,
                    error=f"took longer than environment.timeout = {self._timeout:g} s",
                    seconds=now - call.began,
                )
            )
            self._threads -= 1
            self._start()
        return answers

    def _start(self) -> None:
        self._threads += 1
        threading.Thread(target=self._work, daemon=True, name="megarl-environment").start()

    def _work(self) -> None:
        while (call := self._waiting.get()) is not None:
            call.began = began = time.monotonic()
            try:
                answer = Answer(key=call.key, value=call.function(), seconds=time.monotonic() - began)
            except BaseException as e:  # the pool would lose a thread that ends here
                answer = Answer(key=call.key, error=described(e, __file__), seconds=time.monotonic() - began)
            with call.lock:
                if call.left:
                    _left.discard(call)
                    return
                call.answered = True
            self._answers.put((call, answer))


def described(error: BaseException, caller: str) -> str:
    """Put an exception into a line, and the user's frames below it.

    Args:
        caller: path of the file that called the user's function.
    """
    reason = " ".join("".join(traceback.format_exception_only(error)).split())
    return f"raised {reason[:300]}\n{frames_of(error.__traceback__, {caller})}".rstrip()
