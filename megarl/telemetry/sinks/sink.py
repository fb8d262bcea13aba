"""What a destination of metrics must do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol


class Sink(Protocol):
    """Takes one row of metrics per step.

    Steps count RL steps from 1; step 0 is what comes before them: the validation of the initial policy and the rows
    of the supervised warm-up, told apart by their own counter `warmup/step`.
    """

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write one row; it is in the file when the call returns."""

    def close(self) -> None: ...
