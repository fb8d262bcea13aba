"""Writes texts of others to a terminal: what a model, a row, a reward or a folder's name says moves no cursor there,
hides no line and answers no question of the terminal. Torch-free."""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

# C0 but tab and newline, DEL, C1, the overrides and isolates of writing directions, separators of lines and paragraphs
_UNSEEN = "\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069"
_CONTROL, _CONTROL_OR_RETURN = re.compile(f"[{_UNSEEN}]"), re.compile(f"[{_UNSEEN}\r]")


def plain(text: str) -> str:
    r"""Replace what a terminal would obey in a text by escapes such as `\u001b`, which JSON reads as the same text."""
    return _CONTROL_OR_RETURN.sub(_escaped, text)


class PlainText(io.TextIOWrapper):
    r"""Writes text with escapes for what a terminal would obey, but for `\r`, with which libraries draw progress.

    Attributes:
        copy: gets each text, too, but not what rich draws on a terminal.
    """

    copy: Callable[[str], object] | None = None

    def write(self, text: str) -> int:
        shown = _CONTROL.sub(_escaped, text)
        if self.copy is not None:
            self.copy(shown)
        return super().write(shown)

    @property
    def rich_proxied_file(self) -> Any:
        """Return the stream that rich writes to: rich has cleaned its texts itself, and moves the cursor."""
        return _Raw(self)


class _Raw:
    def __init__(self, stream: io.TextIOWrapper) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        return io.TextIOWrapper.write(self._stream, text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def plain_stream(stream: io.TextIOWrapper, buffer: Any) -> PlainText:
    """Make a `PlainText` that writes to a buffer, with the settings of a stream."""
    stream.flush()
    replacement = PlainText(buffer, stream.encoding, "backslashreplace", line_buffering=stream.line_buffering)
    replacement.reconfigure(write_through=stream.write_through)
    return replacement


@contextmanager
def plain_output() -> Iterator[None]:
    """Let this process's stdout and stderr be `PlainText` meanwhile, where they are files."""
    replaced: dict[str, tuple[Any, PlainText]] = {}
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper) and not isinstance(stream, PlainText):
            replaced[name] = stream, plain_stream(stream, stream.buffer)
            setattr(sys, name, replaced[name][1])
    try:
        yield
    finally:
        for name, (before, stream) in replaced.items():
            stream.detach()  # flushes; else the buffer would be closed with it
            setattr(sys, name, before)


def _escaped(match: re.Match[str]) -> str:
    return f"\\u{ord(match[0]):04x}"
