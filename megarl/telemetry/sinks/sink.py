"""What a destination of metrics must do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol


class Sink(Protocol):
    """Takes rows of metrics. Made with (run_dir, first_step, say), which `open_sinks` describes.

    RL steps count from 1, and step 0 is the validation before the first of them. The steps of a supervised warm-up come
    before that, so that its last one is step -1; their rows have `warmup/step`, counted from 1, too.
    """

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write one row; it is in the file when the call returns.

        Raises:
            OSError: it is not (the disk is full, say). The row is kept and written with the next one that can be.
        """

    def close(self) -> None:
        """Raises OSError if rows are lost."""
