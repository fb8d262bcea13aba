"""Where metrics go: one file per destination."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from megarl.telemetry.sinks.csv_table import CsvSink
from megarl.telemetry.sinks.jsonl import JsonlSink
from megarl.telemetry.sinks.lines import Say
from megarl.telemetry.sinks.sink import Sink
from megarl.telemetry.sinks.tensorboard import TensorBoardSink

__all__ = ["Sink", "open_sinks"]

_BEFORE_ANY_STEP = -(2**40)

_SINKS: dict[str, Callable[[str, int, Say], Sink]] = {
    "jsonl": JsonlSink,
    "csv": CsvSink,
    "tensorboard": TensorBoardSink,
}


def open_sinks(names: Sequence[str], run_dir: str, first_step: int | None, say: Say = print) -> list[Sink]:
    """The sinks named in `trainer.logger`, writing below `run_dir`.

    Args:
        names: "console" is passed over: it is the progress display.
        first_step: the first step that a resumed run will log, at most 0 in a warm-up. What is there of that step and
            later ones is dropped, so that no step appears twice. None for a fresh run, which must find no metric
            files: `set_aside_earlier_run` moves them.
        say: told of lines that cannot be read.
    """
    keep_below = _BEFORE_ANY_STEP if first_step is None else first_step
    return [_SINKS[name](run_dir, keep_below, say) for name in names if name != "console"]
