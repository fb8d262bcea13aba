"""Holds what a comparison came to. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

MOST_LINES = 5
"""Of the details of one comparison."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """Is a row of the table.

    Attributes:
        compared: what was compared, and how much of it: "179 tensors".
        state: `-`: nothing was compared.
        finding: the largest difference, or why nothing was compared.
        details: a line for each thing that differs, the first one first.
    """

    name: str
    compared: str
    state: Literal["same", "DIFFERS", "-"]
    finding: str = ""
    details: tuple[str, ...] = ()


def verdict(name: str, compared: str, finding: str, details: list[str]) -> Result:
    """Make the row of a comparison, which differs if there are details."""
    return Result(
        name=name,
        compared=compared,
        state="DIFFERS" if details else "same",
        finding=finding,
        details=shortened(details),
    )


def shortened(lines: list[str]) -> tuple[str, ...]:
    """Keep the first lines, and count the others."""
    more = len(lines) - MOST_LINES
    return tuple(lines) if more <= 0 else (*lines[:MOST_LINES], f"and {more} more")
