"""Keeps what a process prints in a file of the run folder, beside the console.

RUN/logs/rank_3.log     what rank 3 prints, over all starts; rank_3.log.1 has what came before
RUN/logs/node_0.log     what the launcher of node 0 says: which rank was killed, and by what
"""

from __future__ import annotations

import faulthandler
import logging
import os
import socket
import threading
import time
from contextlib import suppress

from megarl.debugging import debugging
from megarl.telemetry.lines import only_file

LOGS = "logs"
MOST_OF_FIRST, MOST = 8 * 2**20, 2**20
"""Bytes of a log file, of rank 0 and of another process, after which it becomes the earlier one."""
_HELD = 64 * 2**10  # letters that wait for a file
_PATIENCE = 1.0  # seconds: another thread may hang in a write to a disk that does not answer


class LogFile:
    """Appends texts to a file, each line with its time. Each text is in the file when `write` returns, so that nothing
    is lost with a process that is killed. A disk that refuses ends no run.

    Texts before `open` wait for it, the first 64 Ki letters of them.

    Attributes:
        is_fed: whether what the process prints comes here.
    """

    def __init__(self) -> None:
        self.is_fed = False
        self._lock = threading.RLock()
        self._held = ""
        self._folder = self._file = -1
        self._later: tuple[str, str] | None = None
        self._name, self._size, self._most, self._begins_line = "", 0, MOST, True

    def open(self, run_dir: str, name: str, *, most: int = MOST) -> None:
        """Make RUN/logs/NAME.log, or go on with it.

        Args:
            most: bytes after which the file becomes NAME.log.1, and that one is deleted.
        """
        with self._lock, suppress(OSError):
            self.close()
            folder = os.path.join(run_dir, LOGS)
            with suppress(FileExistsError):
                os.mkdir(folder, 0o700)
            self._folder = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            self._name, self._most, self._begins_line, self._later = f"{name}.log", most, True, None
            self._open_file()
            waiting, self._held = self._held, ""
            self.write(f"--- {name} on {socket.gethostname()}, pid {os.getpid()}\n{waiting}")

    def open_if_there(self, run_dir: str, name: str) -> None:
        """Do as `open` as soon as something is written, but only if the ranks have made RUN/logs by then."""
        self._later = run_dir, name

    def write(self, text: str) -> None:
        """Append a text, which may be a part of a line."""
        if not self._lock.acquire(timeout=_PATIENCE):
            return
        try:
            if self._file < 0 and self._later is not None and os.path.isdir(os.path.join(self._later[0], LOGS)):
                self.open(*self._later)
            if self._file < 0:
                self._held += text[: _HELD - len(self._held)]
                return
            data = self._stamped(text).encode("utf-8", "backslashreplace")[-self._most :]
            if self._size + len(data) > self._most:
                self._begin_anew()
            self._size += os.write(self._file, data)
        except OSError:  # a full disk
            pass
        finally:
            self._lock.release()

    def flush(self) -> None:
        """Do nothing: `write` keeps nothing back."""

    def close(self) -> None:
        """Forget the file; texts wait again."""
        for descriptor in (self._file, self._folder):
            if descriptor >= 0:
                os.close(descriptor)
        self._folder = self._file = -1

    def dump_crashes(self) -> None:
        """Write the stacks of Python into the file if a signal such as SIGSEGV ends the process; not if the console
        gets them (`--debug`)."""
        if self._file >= 0 and not debugging():
            faulthandler.enable(self._file)

    def _open_file(self) -> None:
        def opener(name: str, flags: int) -> int:
            return only_file(name, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, folder=self._folder)

        self._file = opener(self._name, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._size = os.fstat(self._file).st_size

    def _begin_anew(self) -> None:
        os.rename(self._name, f"{self._name}.1", src_dir_fd=self._folder, dst_dir_fd=self._folder)
        before = self._file
        self._open_file()
        if faulthandler.is_enabled():
            self.dump_crashes()
        os.close(before)

    def _stamped(self, text: str) -> str:
        stamp = time.strftime("%Y-%m-%d %H:%M:%S ")
        lines = text.split("\n")
        rest = "\n".join([lines[0], *(stamp + line if line else line for line in lines[1:])])
        began, self._begins_line = self._begins_line, not lines[-1]
        return stamp + rest if began and lines[0] else rest


LOG = LogFile()
"""The file of this process."""


def forget_in_child() -> None:
    """Leave the file to the parent: a forked helper that renames it would write into another one than the parent."""
    LOG.close()
    LOG.__init__()  # type: ignore[misc]  # a thread of the parent may have held the lock


os.register_at_fork(after_in_child=forget_in_child)


def keep_records(level: str) -> None:
    """Write the records of Python's logging into the file that are too low for the console, down to a level.

    Args:
        level: debug, info or warning.
    """
    lowest, root = int(getattr(logging, level.upper())), logging.getLogger()
    shown = logging.INFO if debugging() else logging.WARNING
    if lowest >= shown:
        return
    if not root.handlers and logging.lastResort is not None:
        root.addHandler(logging.lastResort)
    for console in root.handlers:
        console.setLevel(max(console.level, shown))
    kept = logging.StreamHandler(LOG)
    kept.addFilter(lambda record: record.levelno < shown)
    kept.setFormatter(logging.Formatter("%(name)s %(levelname)s %(message)s"))
    root.addHandler(kept)
    root.setLevel(lowest)


def keep_log(run_dir: str, rank: int, level: str) -> None:
    """Keep what this rank prints from now on, and has printed, if its streams are copied: `go_on_without`.

    Args:
        level: of records of Python's logging, see `keep_records`.
    """
    if not LOG.is_fed:
        return
    LOG.open(run_dir, f"rank_{rank}", most=MOST if rank else MOST_OF_FIRST)
    LOG.dump_crashes()
    keep_records(level)
