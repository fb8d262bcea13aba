"""One thing that was looked at. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class State(Enum):
    """Whether a run can do with it."""

    OK = "ok"
    OPTIONAL = "optional"
    MISSING = "missing"


@dataclass(frozen=True)
class Finding:
    """A line of `megarl doctor`.

    Attributes:
        detail: version, figure, or why it is as it is.
        cure: what to do, where something could be better.
    """

    name: str
    state: State
    detail: str
    cure: str = ""
