"""Where metrics go: one file per destination."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from megarl.registry import Registry
from megarl.telemetry.sinks.lines import Say
from megarl.telemetry.sinks.sink import Sink

__all__ = ["SINKS", "Sink", "open_sinks"]

_BEFORE_ANY_STEP = -(2**40)

SINKS: Registry[Callable[[str, int, Say], Sink]] = Registry(
    "trainer.logger",
    "class",
    lazy={
        "console": "megarl.telemetry.sinks.console:ConsoleSink",
        "jsonl": "megarl.telemetry.sinks.jsonl:JsonlSink",
        "csv": "megarl.telemetry.sinks.csv_table:CsvSink",
        "tensorboard": "megarl.telemetry.sinks.tensorboard:TensorBoardSink",
    },
)
"""Called with run folder, first step and `say`, as `open_sinks` describes them."""


def open_sinks(names: Sequence[str], run_dir: str, first_step: int | None, say: Say = print) -> list[Sink]:
    """The sinks named in `trainer.logger`, writing below `run_dir`.

    Args:
        names: registered ones, or `path/to/file.py:class`.
        first_step: the first step that a resumed run will log, at most 0 in a warm-up. What is there of that step and
            later ones is dropped, so that no step appears twice. None for a fresh run, which must find no metric
            files: `set_aside_earlier_run` moves them.
        say: told of lines that cannot be read.

    Raises:
        ValueError: a name that `SINKS` does not know.
    """
    keep_below = _BEFORE_ANY_STEP if first_step is None else first_step
    return [SINKS.load(name)(run_dir, keep_below, say) for name in names]
