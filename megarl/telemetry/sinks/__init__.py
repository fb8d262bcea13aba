"""Where metrics go: one file per destination."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from megarl.telemetry.sinks.csv_table import CsvSink
from megarl.telemetry.sinks.jsonl import JsonlSink
from megarl.telemetry.sinks.sink import Sink
from megarl.telemetry.sinks.tensorboard import TensorBoardSink

__all__ = ["Sink", "open_sinks"]

_BEFORE_ANY_WARMUP = -(2**40)  # an earlier run may have had a longer warm-up than this one

_SINKS: dict[str, Callable[[str, int], Sink]] = {
    "jsonl": JsonlSink,
    "csv": CsvSink,
    "tensorboard": TensorBoardSink,
}


def open_sinks(names: Sequence[str], run_dir: str, first_step: int) -> list[Sink]:
    """The sinks named in `trainer.logger`, writing below `run_dir`.

    Args:
        names: "console" is passed over: it is the progress display.
        first_step: the first RL step that this run will log. What an earlier run left for that step and later ones
            is dropped, so that no step appears twice; of 1 or less, nothing of an earlier run is kept.
    """
    keep_below = first_step if first_step > 1 else _BEFORE_ANY_WARMUP
    return [_SINKS[name](run_dir, keep_below) for name in names if name != "console"]
