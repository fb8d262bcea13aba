"""Writes and reads text files of rows that survive a full disk, a kill and damaged lines."""

from __future__ import annotations

import itertools
import os
import shutil
import stat
from collections.abc import Callable
from contextlib import suppress

LONGEST = 64 << 20
"""Bytes of the longest line that is read."""
Say = Callable[[str], None]
"""A function that shows a person one line."""


class LineFile:
    """Appends whole lines to a file. Lines that a full disk refuses are kept and written with a later one."""

    def __init__(self, path: str) -> None:
        """
        Args:
            path: a file that holds whole lines only, or does not exist yet.
        """
        self._file = open(path, "ab", buffering=0, opener=no_link)  # noqa: SIM115
        self._whole = self._file.seek(0, os.SEEK_END)
        self._pending = b""

    def append(self, line: str) -> None:
        """Write a line after the lines that still wait. Raises OSError if they have to wait on."""
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
    """Read the lines of a text file, without a last line that a killed run left half-written; [] without a file.

    Reading stops at a line longer than `LONGEST`, which no run writes; its first 100 bytes are the last line returned.
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
        damaged: how many of the other lines cannot be read; if any, a copy of the whole file is kept beside it.
    """
    if damaged:
        copy = copy_damaged(path)
        number = "1 line" if damaged == 1 else f"{damaged} lines"
        say(f"{path}: left out {number} that cannot be read; the file as it was is {copy}")
    text = b"".join(lines)
    if os.path.exists(path):
        with open(path, "rb") as f:
            same_beginning = f.read(len(text)) == text
        if same_beginning:  # needs no room on a disk that is full
            os.truncate(path, len(text))
            return
    rewrite(path, text)


def no_link(path: str, flags: int) -> int:
    """Open a file, as the `opener` of `open`. Raises OSError for a link, through which another file would be
    overwritten, and for a pipe, for whose reader `open` would wait."""
    return only_file(path, flags | os.O_NOFOLLOW, 0o666)


def no_link_private(path: str, flags: int) -> int:
    """Open a file like `no_link`, and let no other user read it."""
    descriptor = only_file(path, flags | os.O_NOFOLLOW, 0o600)
    os.fchmod(descriptor, 0o600)  # an existing file keeps its mode otherwise
    return descriptor


def only_file(path: str, flags: int, mode: int = 0o666, *, folder: int | None = None) -> int:
    """Open a file, as the `opener` of `open`. Raises OSError for a pipe (it blocks) and a device (it never ends).

    Args:
        folder: descriptor of the folder to which the path is relative; default the working directory.
    """
    descriptor = os.open(path, flags | os.O_NONBLOCK, mode, dir_fd=folder)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    raise OSError("it is no file")


def rewrite(path: str, text: bytes, *, private: bool = False) -> None:
    """Replace a file's content in one move: a kill in between leaves the old or the new, never half of it.

    Args:
        private: let no other user read the file.
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


def write_new(path: str, text: bytes, *, private: bool = False) -> None:
    """Write a file that is not there yet. Raises OSError if it is, and for a link, a pipe or a device in its place.

    Args:
        private: let no other user read the file.
    """
    with open(path, "xb", opener=no_link_private if private else no_link) as f:
        try:
            f.write(text)
            f.flush()
        except OSError:
            os.unlink(path)
            raise


def copy_damaged(path: str) -> str:
    """Copy a file to PATH.damaged (-2, -3 ... if that exists); returns the copy's path."""
    names = (f"{path}.damaged{'' if i == 1 else f'-{i}'}" for i in itertools.count(1))
    copy = next(name for name in names if not os.path.exists(name))
    shutil.copyfile(path, copy)
    return copy
