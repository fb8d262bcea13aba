"""Defines the interfaces of a destination of metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

from megarl.telemetry.samples import Sample


class Sink(Protocol):
    """Takes rows of metrics. Its class is called with (run_dir, first_step, say), see `open_sinks`.

    RL steps count from 1; step 0 is the validation before the first. The steps of a supervised warm-up are negative,
    its last is -1; their rows also have `warmup/step`, which counts from 1.

    A class with `configured = True` is called with the run's `Config` as a fourth argument. A sink with
    `append_only = True` stays open when the run goes back to an earlier step, and gets that step's row again.
    """

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write one row. It is in the file when the call returns; the step waits for that.

        Raises:
            OSError: the row cannot be written now (the disk is full, say). The sink keeps it for the next call.
        """

    def close(self) -> None:
        """Write the kept rows and close. Raises OSError if rows are lost."""


@runtime_checkable
class TakesRollouts(Protocol):
    """Describes a sink that shows sample rollouts."""

    def rollouts(self, step: int, samples: Sequence[Sample]) -> None: ...


@runtime_checkable
class TakesArtifacts(Protocol):
    """Describes a sink that records the files of a run."""

    def artifact(self, path: str) -> None:
        """Record config.yaml, or the folder of a checkpoint with its Hugging Face export."""
