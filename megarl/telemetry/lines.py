"""Text files of rows that outlive a full disk, a kill and damaged lines."""

from __future__ import annotations

import itertools
import os
import shutil
import stat
from collections.abc import Callable
from contextlib import suppress

LONGEST = 64 << 20
"""Bytes of a line."""
Say = Callable[[str], None]
"""Tells a person one line."""


class LineFile:
    """A file of whole lines; what cannot be written now is kept and written when there is room."""

    def __init__(self, path: str) -> None:
        """
        Args:
            path: holds whole lines only, or does not exist.
        """
        self._file = open(path, "ab", buffering=0, opener=no_link)  # noqa: SIM115
        self._whole = self._file.seek(0, os.SEEK_END)
        self._pending = b""

    def append(self, line: str) -> None:
        """Write a line, and those before it that are still to be written. Raises OSError if they have to wait."""
        self._pending += line.encode()
        try:
            rest = memoryview(self._pending)
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError:
            with suppress(OSError):
                self._file.truncate(self._whole)  # half a line would join with the next one
            raise
        self._whole += len(self._pending)
        self._pending = b""

    def close(self) -> None:
        try:
            self.append("")
        finally:
            self._file.close()


def complete_lines(path: str) -> list[bytes]:
    """Lines of a text file, without a last one that a killed run left half-written; none if there is no file.

    Of one longer than `LONGEST`, which no run writes, there is the beginning, and nothing after it.
    """
    if not os.path.isfile(path):
        return []
    lines: list[bytes] = []
    with open(path, "rb") as f:
        while line := f.readline(LONGEST):
            if line.endswith(b"\n"):
                lines.append(line)
            elif len(line) == LONGEST:
                return [*lines, line[:100] + b"\n"]
    return lines


def keep(path: str, lines: list[bytes], *, damaged: int, say: Say) -> None:
    """Cut a file down to some of its lines.

    Args:
        damaged: how many of the others make no sense; if any, the file is kept as it was beside the new one.
    """
    if damaged:
        aside = set_aside_damaged(path)
        what = "1 line" if damaged == 1 else f"{damaged} lines"
        say(f"{path}: left out {what} that cannot be read; the file as it was is {aside}")
    text = b"".join(lines)
    if os.path.exists(path):
        with open(path, "rb") as f:
            same_beginning = f.read(len(text)) == text
        if same_beginning:  # needs no room on a disk that is full
            os.truncate(path, len(text))
            return
    rewrite(path, text)


def no_link(path: str, flags: int) -> int:
    """For `open`: raises OSError for a link, which would lead what is written into another file, and for a pipe, which
    would be waited for."""
    return only_file(path, flags | os.O_NOFOLLOW, 0o666)


def no_link_private(path: str, flags: int) -> int:
    """The same, for a file that no other user can read."""
    descriptor = only_file(path, flags | os.O_NOFOLLOW, 0o600)
    os.fchmod(descriptor, 0o600)  # it may have been there
    return descriptor


def only_file(path: str, flags: int, mode: int = 0o666) -> int:
    """For `open`: raises OSError for a pipe, which would be waited for, and a device, which does not end."""
    descriptor = os.open(path, flags | os.O_NONBLOCK, mode)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    raise OSError("it is no file")


def rewrite(path: str, text: bytes, *, private: bool = False) -> None:
    """Replace a file's content in one move: a kill in between leaves the old or the new, never half of it.

    Args:
        private: no other user can read it.
    """
    new = path + ".new"
    try:
        with open(new, "wb", opener=no_link_private if private else no_link) as f:
            f.write(text)
        os.replace(new, path)
    except OSError:
        with suppress(OSError):
            os.unlink(new)  # it would keep a full disk full
        raise


def set_aside_damaged(path: str) -> str:
    """Copy a file to PATH.damaged (-2, -3 ... if that is taken); returns the copy's name."""
    names = (f"{path}.damaged{'' if i == 1 else f'-{i}'}" for i in itertools.count(1))
    aside = next(name for name in names if not os.path.exists(name))
    shutil.copyfile(path, aside)
    return aside
