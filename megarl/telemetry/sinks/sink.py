"""What a destination of metrics must do, and what it may do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

from megarl.telemetry.samples import Sample


class Sink(Protocol):
    """Takes rows of metrics. Made with (run_dir, first_step, say), which `open_sinks` describes.

    RL steps count from 1, and step 0 is the validation before the first of them. The steps of a supervised warm-up come
    before that, so that its last one is step -1; their rows have `warmup/step`, counted from 1, too.

    A class that says `configured = True` is made with a fourth argument, the run's `Config`. One that says
    `append_only = True` stays open when the run goes back to an earlier step, whose rows then come again.
    """

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write one row; it is in the file when the call returns. The step waits for it.

        Raises:
            OSError: it is not (the disk is full, say). The row is kept and written with the next one that can be.
        """

    def close(self) -> None:
        """Raises OSError if rows are lost."""


@runtime_checkable
class TakesRollouts(Protocol):
    """A sink that shows sample rollouts."""

    def rollouts(self, step: int, samples: Sequence[Sample]) -> None: ...


@runtime_checkable
class TakesArtifacts(Protocol):
    """A sink that notes what a run leaves behind."""

    def artifact(self, path: str) -> None:
        """A file or folder: config.yaml, or a checkpoint with a Hugging Face folder."""
