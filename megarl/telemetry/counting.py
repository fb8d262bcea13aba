"""Progress of a number of equal things on the terminal; where there is none, a line for each tenth of them."""

from __future__ import annotations

import sys
from types import TracebackType

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from megarl.telemetry.console import Output

LINES = 10


class Counting:
    """Context manager; call `one_more` for each thing that is done."""

    def __init__(self, total: int, description: str) -> None:
        self._total, self._description, self._done = total, description, 0
        columns = (TextColumn("[bold]{task.description}"), BarColumn(bar_width=None), MofNCompleteColumn())
        self._bar: Progress | None = None
        if sys.stdout.isatty():
            console = Output(file=sys.stdout)
            self._bar = Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console)
            self._task = self._bar.add_task(description, total=total)

    def __enter__(self) -> Counting:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def one_more(self) -> None:
        self._done += 1
        if self._bar is not None:
            self._bar.update(self._task, completed=self._done)
        elif self._done * LINES // self._total > (self._done - 1) * LINES // self._total:
            print(f"{self._description} {self._done}/{self._total}", flush=True)
