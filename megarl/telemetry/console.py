"""The terminal, or what stands for it: nothing that happens there ends a run."""

from __future__ import annotations

import io
import os
import sys
from contextlib import suppress
from typing import Any, NoReturn

from rich.console import Console


class Output(Console):
    """Rich's, which on a pipe that nobody reads (`megarl plan ... | head`) leaves the rest to `megarl.cli.main`."""

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
        at_once = stream.line_buffering or stream.write_through  # the latter by PYTHONUNBUFFERED
        lasting = io.TextIOWrapper(through, stream.encoding, "backslashreplace", line_buffering=at_once)
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
