"""Defines exceptions that end a run before its last step: the run or its input is wrong, or a signal came."""

from __future__ import annotations

from signal import Signals


class RunStopped(RuntimeError):
    """Ends a run on every rank before its last step; the message is one line that says why, what is left, and what to
    look at."""


class RunInterrupted(Exception):
    """Ends a run on every rank between two steps, after a signal; what was trained is saved.

    Attributes:
        signal: what a rank got.
    """

    def __init__(self, signal: Signals) -> None:
        super().__init__(signal.name)
        self.signal = signal


class RunRefused(ValueError):
    """Ends a run on every rank before its first step; the message is one line that says what to change."""
