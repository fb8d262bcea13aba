"""How a run ends before its last step because something is wrong with it."""

from __future__ import annotations


class RunStopped(RuntimeError):
    """Raised on every rank alike; the message is one line that says why, what is left, and what to look at."""
