"""What follows updates whose loss or gradient was not finite: `trainer.on_nonfinite`. The actor has left them out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

LIMIT = 3
"""Updates left out in a row, or rollbacks to the same checkpoint, after which the run stops."""


class NonFiniteUpdates:
    """Asked at the end of every step, so that a run which stops can still save a whole step.

    Args:
        mode: skip goes on until `LIMIT` updates in a row were left out; stop and rollback do not wait.
        step: the last finished one.
    """

    def __init__(self, mode: Literal["skip", "stop", "rollback"], step: int) -> None:
        self._mode, self._last_good, self._in_a_row = mode, step, 0
        self._rolled_back_to: list[int] = []

    def after_step(self, step: int, skipped: Sequence[bool]) -> str | None:
        """The same on every rank.

        Args:
            skipped: of each update of the step, whether it was left out.

        Returns:
            what happened, in one clause, if the run cannot go on as it is; else None.
        """
        longest = self._in_a_row
        for left_out in skipped:
            self._in_a_row = self._in_a_row + 1 if left_out else 0
            longest = max(longest, self._in_a_row)
        if not any(skipped):
            self._last_good = step
            return None
        if self._mode == "skip" and longest < LIMIT:
            return None
        updates = "an update" if longest == 1 else f"{longest} updates in a row"
        return (
            f"step {step}: loss or gradient norm of {updates} was not finite, and the weights did not change; the last "
            f"step without is {self._last_good}"
        )

    def may_roll_back(self, step: int) -> bool:
        """Note that the run goes back to a step; False if it did so too often without a later checkpoint."""
        self._rolled_back_to.append(step)
        self._last_good, self._in_a_row = step, 0
        return self._rolled_back_to.count(step) <= LIMIT
