"""Decides what follows updates that the actor left out, as loss or gradient was not finite: `trainer.on_nonfinite`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Literal

LIMIT = 3
"""Updates left out in a row, or rollbacks to the same checkpoint, after which the run stops."""


class NonFiniteUpdates:
    """Decides at the end of every step whether the run goes on, so that a run which stops can still save a whole step.

    Args:
        mode: skip goes on until `LIMIT` updates of a model in a row were left out; stop and rollback do not wait.
        step: the last finished one.
    """

    def __init__(self, mode: Literal["skip", "stop", "rollback"], step: int) -> None:
        self._mode, self._last_good = mode, step
        self._in_a_row = Counter[str]()
        self._rolled_back_to: list[int] = []

    def after_step(self, step: int, skipped: Mapping[str, Sequence[bool]]) -> str | None:
        """Note the updates of a step; the result is the same on every rank.

        Args:
            skipped: by model, of each of its updates in the step, whether it was left out.

        Returns:
            what happened, in one clause, if the run cannot go on as it is; else None.
        """
        longest = max(self._in_a_row.values(), default=0)
        for model, updates_of_it in skipped.items():
            for left_out in updates_of_it:
                self._in_a_row[model] = self._in_a_row[model] + 1 if left_out else 0
                longest = max(longest, self._in_a_row[model])
        if not any(map(any, skipped.values())):
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
        self._last_good = step
        self._in_a_row.clear()
        return self._rolled_back_to.count(step) <= LIMIT
