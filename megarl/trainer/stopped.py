"""How a run ends before its last step because something is wrong with it or with what it was given."""

from __future__ import annotations


class RunStopped(RuntimeError):
    """Raised on every rank alike; the message is one line that says why, what is left, and what to look at."""


class RunRefused(ValueError):
    """Raised on every rank alike, before the first step; the message is one line that says what to change."""
