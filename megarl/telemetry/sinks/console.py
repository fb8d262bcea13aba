"""Implements the console sink: `megarl.telemetry.progress` shows the rows."""

from __future__ import annotations

from collections.abc import Mapping

from megarl.telemetry.lines import Say


class ConsoleSink:
    """Writes nothing. A run that names this sink shows its progress."""

    def __init__(self, run_dir: str, first_step: int, say: Say) -> None:
        del run_dir, first_step, say

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        del step, metrics

    def close(self) -> None: ...
