"""Sample rollouts as the rows of a table."""

from __future__ import annotations

from megarl.telemetry.samples import Sample

COLUMNS = ("step", "prompt", "response", "answer", "reward")


def cells(step: int, sample: Sample) -> list[int | float | str | None]:
    """One row, in the order of `COLUMNS`; no reward where scoring failed."""
    return [step, sample.prompt, sample.response, sample.answer, sample.reward]
