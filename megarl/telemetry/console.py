"""Writes to the terminal or a pipe. A failure to write there ends no run."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, NoReturn

from rich.console import Console, ConsoleOptions
from rich.segment import Segment

from megarl.plain import PlainText, plain, plain_stream
from megarl.telemetry.log_file import LOG


class Output(Console):
    """Prints as rich's console does, but shows control characters of foreign texts as visible ones.

    On a pipe that nobody reads (`megarl plan ... | head`) it raises BrokenPipeError, which `megarl.cli.main` handles.
    """

    def render(self, renderable: Any, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=plain(segment.text))

    def _stream(self) -> Any:
        """Return the terminal itself, also while rich has put its own proxy in the place of stdout."""
        file = super().file
        return getattr(file, "rich_proxied_file", file)

    file = property(_stream, Console.file.fset)  # type: ignore[attr-defined]

    def on_broken_pipe(self) -> NoReturn:
        raise BrokenPipeError


def plain_console() -> Output:
    """Make a console that prints text unchanged: no markup, no colours, no line breaks."""
    return Output(highlight=False, markup=False, soft_wrap=True)


def go_on_without() -> None:
    """Replace stdout and stderr by streams that drop what cannot be written, and copy all texts into the log file.

    A reader that ended (`| head`, a `tee` that was killed) or a full disk below a log is no reason to end a run.
    """
    for name in ("stdout", "stderr"):
        stream: Any = getattr(sys, name)
        if not isinstance(stream, io.TextIOWrapper) or isinstance(getattr(stream.buffer, "raw", None), _Unfailing):
            continue
        try:
            descriptor = stream.fileno()
        except io.UnsupportedOperation:  # what a program has put in the place of its output
            continue
        stream.flush()
        through = io.BufferedWriter(_Unfailing(descriptor, "wb", closefd=False))
        new_stream = plain_stream(stream, through)
        at_once = stream.line_buffering or stream.write_through  # the latter by PYTHONUNBUFFERED
        new_stream.reconfigure(line_buffering=at_once, write_through=False)
        setattr(sys, name, new_stream)
    LOG.is_fed = True
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, PlainText):
            stream.copy = LOG.write


class _Unfailing(io.FileIO):
    """Writes to a file and raises nothing if that fails. The first failed write puts one warning on stderr."""

    _failed = False

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as e:
            if not self._failed:
                self._failed = True
                with suppress(OSError):
                    os.write(2, f"megarl: warning: output is lost ({e.strerror}); the run goes on\n".encode())
            return len(data)
