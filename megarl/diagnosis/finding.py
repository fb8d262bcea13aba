"""Describes the result of one check of `megarl doctor`. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class State(Enum):
    """Says whether a run can work with what was found."""

    OK = "ok"
    OPTIONAL = "optional"
    MISSING = "missing"


@dataclass(frozen=True)
class Finding:
    """Holds a line of `megarl doctor`.

    Attributes:
        detail: version, figure, or reason.
        cure: a command or an advice; empty if nothing needs to change.
    """

    name: str
    state: State
    detail: str
    cure: str = ""
