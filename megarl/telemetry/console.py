"""The terminal, or what stands for it: nothing that happens there ends a run."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, NoReturn

from rich.console import Console, ConsoleOptions
from rich.segment import Segment

from megarl.plain import plain, plain_stream


class Output(Console):
    """Rich's, for texts of others, whose control characters it shows. On a pipe that nobody reads (`megarl plan ... |
    head`) it leaves the rest to `megarl.cli.main`."""

    def render(self, renderable: Any, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=plain(segment.text))

    def _stream(self) -> Any:
        """The terminal itself, also while rich's own stand-in for it is in the place of stdout."""
        file = super().file
        return getattr(file, "rich_proxied_file", file)

    file = property(_stream, Console.file.fset)  # type: ignore[attr-defined]

    def on_broken_pipe(self) -> NoReturn:
        raise BrokenPipeError


def plain_output() -> Output:
    """For text as it is: no markup, no colours, no breaks."""
    return Output(highlight=False, markup=False, soft_wrap=True)


def go_on_without() -> None:
    """What cannot be written to this process's output any more is lost, and the process goes on.

    A reader that ended (`| head`, a `tee` that was killed) or a full disk below a log is no reason to end a run.
    """
    for name in ("stdout", "stderr"):
        stream: Any = getattr(sys, name)
        if not isinstance(stream, io.TextIOWrapper) or isinstance(getattr(stream.buffer, "raw", None), _Unfailing):
            continue
        stream.flush()
        through = io.BufferedWriter(_Unfailing(stream.fileno(), "wb", closefd=False))
        lasting = plain_stream(stream, through)
        at_once = stream.line_buffering or stream.write_through  # the latter by PYTHONUNBUFFERED
        lasting.reconfigure(line_buffering=at_once, write_through=False)
        setattr(sys, name, lasting)


class _Unfailing(io.FileIO):
    """A file to which writing always succeeds; of the first time that it did not, stderr is told."""

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
