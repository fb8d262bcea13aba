"""Starts processes in which verifiers of other packages score: one for each function, in each process that scores."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import Any

from megarl.isolation.launch import Isolation
from megarl.rewards.arguments import check_timeout
from megarl.rewards.sandbox import check_isolation
from megarl.workers.child import Child, WorkerError


@cache
def outsider(function: str, distributions: tuple[str, ...], isolation: Isolation) -> Child:
    """Return the process that calls a function, "module:function", which imports some distributions."""
    return Child(function, distributions=distributions, isolation=isolation)


def start_early(process: Callable[[Isolation], Child]) -> None:
    """Start a process before its first call, where namespaces can be made."""
    with suppress(WorkerError):  # none can, and isolation=process
        process("namespaces").start()


def check_outsiders(timeout: float, isolation: Isolation) -> None:
    """Raise ValueError, in one line that says what to change, if these arguments allow no process."""
    check_timeout(timeout)
    if isolation == "namespaces":
        check_isolation()


def score_of(answer: Any) -> float | None:
    """Return the score in an answer; None if it holds no number from 0 to 1."""
    score = answer.get("score") if isinstance(answer, dict) else None
    if isinstance(score, bool) or not isinstance(score, int | float) or not 0 <= score <= 1:
        return None
    return float(score)
