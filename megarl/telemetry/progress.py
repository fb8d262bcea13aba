"""Shows progress on the terminal or in a notebook; elsewhere prints lines: one per step of a run, ten of a count."""

from __future__ import annotations

import io
import math
import sys
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

from rich.console import Group
from rich.live import Live
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    ProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as ProgressBar
from rich.table import Table
from rich.text import Text

from megarl.telemetry.console import Output
from megarl.telemetry.log_file import LOG

# metric -> (label, format); other metrics are in the metric files only
_SHOWN: dict[str, tuple[str, Callable[[float], str]]] = {
    "warmup/loss": ("loss", lambda x: f"{x:.4f}"),
    "train/loss": ("loss", lambda x: f"{x:.4f}"),
    "val/loss": ("held-out loss", lambda x: f"{x:.4f}"),
    "reward/mean": ("reward", lambda x: f"{x:.3f}"),
    "val/accuracy": ("accuracy", lambda x: f"{x:.1%}"),
    "tokens_per_s": ("tokens/s", lambda x: f"{x:,.0f}"),
}
_LINES = 10  # of a whole count, without a terminal


def _columns() -> tuple[ProgressColumn, ...]:
    name = TextColumn("[bold]{task.description}")
    return name, BarColumn(bar_width=None), MofNCompleteColumn(), TimeElapsedColumn()


class Progress:
    """Shows the progress of a loop of steps, as a context manager. Call `advance` once per step, on one rank only.

    Args:
        total: steps of the whole loop.
        description: the loop's name, such as "RL" or "warm-up".
        done: steps that were made before this run was resumed.
    """

    def __init__(self, total: int, description: str, done: int = 0) -> None:
        self._total, self._description = total, description
        self._first = self._done = done
        self._started = time.monotonic()
        self._latest: dict[str, str] = {}
        self._live: Live | None = None
        self._cell: Any = None  # a notebook's output that shows the last step
        if sys.stdout.isatty():
            self._bar = ProgressBar(*_columns(), TextColumn("eta {task.fields[eta]}"), expand=True)
            self._task = self._bar.add_task(description, total=total, completed=done, eta="-")
            self._live = Live(self._bar, console=Output(file=sys.stdout), refresh_per_second=4)
        elif Output().is_jupyter:
            from IPython.display import display

            self._cell = display({"text/plain": f"{description} {done}/{total}"}, raw=True, display_id=True)

    def __enter__(self) -> Progress:
        self._started = time.monotonic()
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def advance(self, metrics: Mapping[str, float]) -> None:
        """Show a finished step.

        Args:
            metrics: named as in the metric files. A metric that a later step lacks stays in view.
        """
        self._done += 1
        values = {label: text(metrics[key]) for key, (label, text) in _SHOWN.items() if key in metrics}
        phases = {
            key.removeprefix("timing/").removesuffix("_s"): f"{seconds:.2f}s"
            for key, seconds in metrics.items()
            if key.startswith("timing/") and seconds >= 0.005
        }
        groups = ["  ".join(f"{name} {value}" for name, value in group.items()) for group in (values, phases)]
        text = " | ".join(group for group in groups if group)
        line = f"{self._description} {self._done}/{self._total} | {text} | eta {self._eta()}"
        if self._live is None:
            if self._cell is None:
                self.note(line)
            else:
                self._cell.update({"text/plain": line}, raw=True)
            return
        LOG.write(f"{line}\n")
        self._latest.update(values)
        self._bar.update(self._task, completed=self._done, eta=self._eta())
        self._live.update(Group(self._bar, _line(self._latest), _line(phases)))

    def note(self, what: str | Table) -> None:
        """Print a line or a table that stays above the bar."""
        if self._live is not None:
            LOG.write(f"{what}\n" if isinstance(what, str) else as_text(what))
            self._live.console.print(Text(what) if isinstance(what, str) else what)
        elif isinstance(what, str):
            print(what, flush=True)
        else:
            print_table(what)

    def _eta(self) -> str:
        """Estimate the time left from the mean seconds of this run's steps."""
        mean = (time.monotonic() - self._started) / (self._done - self._first)
        return duration(mean * (self._total - self._done))


class Counting:
    """Shows the progress of a number of equal tasks, as a context manager. Call `one_more` after each task.

    A terminal shows a bar; elsewhere a line is printed for each tenth of the tasks.
    """

    def __init__(self, total: int, description: str) -> None:
        self._total, self._description, self._done = total, description, 0
        self._bar: ProgressBar | None = None
        if sys.stdout.isatty():
            self._bar = ProgressBar(*_columns(), TimeRemainingColumn(), console=Output(file=sys.stdout))
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
        elif self._done * _LINES // self._total > (self._done - 1) * _LINES // self._total:
            print(f"{self._description} {self._done}/{self._total}", flush=True)


def print_table(table: Table) -> None:
    """Print a table as wide as the terminal; without a terminal, as wide as its content."""
    LOG.write(as_text(table))
    console = Output()
    if not console.is_terminal:
        console = Output(width=_width(table))
    console.print(table)


def as_text(table: Table) -> str:
    """Write a table as it looks without a terminal."""
    text = io.StringIO()
    Output(file=text, width=_width(table)).print(table)
    return text.getvalue()


def _width(table: Table) -> int:
    return Output(width=1000).measure(table).maximum


def duration(seconds: float) -> str:
    """Write seconds for people: 59 -> 59s, 61 -> 1m01s, 3661 -> 1h01m."""
    whole = math.ceil(seconds)
    if whole < 60:
        return f"{whole}s"
    minutes, rest = divmod(whole, 60)
    return f"{minutes}m{rest:02d}s" if minutes < 60 else f"{minutes // 60}h{minutes % 60:02d}m"


def _line(fields: Mapping[str, str]) -> Text:
    """Write `name value` pairs with dimmed names, cut at the terminal's edge."""
    text = Text(no_wrap=True, overflow="ellipsis")
    for name, value in fields.items():
        text.append(f"{name} ", style="dim").append(f"{value}   ")
    return text
