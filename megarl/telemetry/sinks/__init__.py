"""Where metrics go: one file per destination."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from megarl.telemetry.sinks.csv_table import CsvSink
from megarl.telemetry.sinks.jsonl import JsonlSink
from megarl.telemetry.sinks.sink import Sink
from megarl.telemetry.sinks.tensorboard import TensorBoardSink

__all__ = ["Sink", "open_sinks"]

_SINKS: dict[str, Callable[[str, int], Sink]] = {
    "jsonl": JsonlSink,
    "csv": CsvSink,
    "tensorboard": TensorBoardSink,
}


def open_sinks(names: Sequence[str], run_dir: str, first_step: int) -> list[Sink]:
    """The sinks named in `trainer.logger`, writing below `run_dir`.

    Args:
        names: "console" is passed over: it is the progress display.
        first_step: the first step that this run will log, 0 for a fresh one. What an earlier run left for that step
            and later ones is removed, so that no step appears twice.
    """
    return [_SINKS[name](run_dir, first_step) for name in names if name != "console"]
