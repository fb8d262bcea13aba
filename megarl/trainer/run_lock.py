"""Locks a run folder for one run at a time, with the file RUN/lock. It names that run, or how the last one ended.

{"host": "node7", "pid": 123, "since": "2026-01-31 12:00", "began": 1769860800.0, "steps": 500, "ended": "finished"}
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import stat
import sys
import time
from contextlib import suppress
from datetime import datetime
from typing import Any

from megarl.trainer.starts import note_end

LOCK_FILE = "lock"
PATIENCE = 1.0  # seconds: a process that was killed holds its lock for a moment more, and so does one that only looks
_WITHOUT_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOLCK)


class RunLock:
    """Holds a run folder until this process ends, however it ends: the kernel gives the lock back."""

    def __init__(self, run_dir: str, *, steps: int | None = None) -> None:
        """
        Args:
            steps: number of steps of the whole run.

        Raises:
            ValueError: another run is in the folder, or a link leads the run's files elsewhere; says what to change.
        """
        os.makedirs(os.path.dirname(os.path.abspath(run_dir)), exist_ok=True)
        with suppress(FileExistsError):  # an existing folder keeps its rights
            os.mkdir(run_dir, 0o700)
        # a descriptor that Python opens is closed in programs that this process starts; see below for forked helpers
        self._descriptor = _open(run_dir, os.O_RDWR | os.O_CREAT)
        try:
            _take(self._descriptor, fcntl.LOCK_EX, run_dir, remark=True)
            _check_ours(self._descriptor, run_dir)
            _check_links(run_dir)
        except ValueError:
            os.close(self._descriptor)
            raise
        # A helper that outlives this process would keep the folder locked.
        os.register_at_fork(after_in_child=self.release)
        self._run_dir, self._began = run_dir, time.time()
        since = datetime.fromtimestamp(self._began).strftime("%Y-%m-%d %H:%M")
        self._holder = {"host": socket.gethostname(), "pid": os.getpid(), "since": since, "began": self._began}
        self._holder["steps"] = steps
        self._write()

    def note_end(self, how: str) -> None:
        """Write down how the run ended, in a line such as "finished"; the folder is still held."""
        self._holder["ended"] = how
        with suppress(OSError):  # a full disk: then nobody knows
            self._write()
            note_end(self._run_dir, self._began, how)

    def release(self) -> None:
        """Give the folder back before the process ends."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _write(self) -> None:
        written = json.dumps(self._holder).encode()
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, written, 0)


def check_free(run_dir: str) -> None:
    """Refuse a folder that a run is in; leaves nothing there and holds nothing. Raises ValueError."""
    try:
        descriptor = _open(run_dir, os.O_RDONLY)
    except (OSError, ValueError):
        return
    try:
        _take(descriptor, fcntl.LOCK_SH, run_dir, remark=False)
    finally:
        os.close(descriptor)


def holder_of(run_dir: str) -> tuple[dict[str, Any], bool]:
    """Read the lock's file, empty if there is none, and whether a run holds the folder now."""
    try:
        descriptor = _open(run_dir, os.O_RDONLY)
    except (OSError, ValueError):
        return {}, False
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            is_held = False
        except OSError as e:
            is_held = e.errno in (errno.EWOULDBLOCK, errno.EACCES)
        holder: Any = {}
        with suppress(OSError, ValueError, RecursionError):
            holder = json.loads(os.pread(descriptor, 4096, 0))
        return (holder if isinstance(holder, dict) else {}), is_held
    finally:
        os.close(descriptor)


def _open(run_dir: str, flags: int) -> int:
    """Open the lock's file, and never a file that a link leads to: the lock's text would replace that file's.

    Raises:
        ValueError: the lock is a link.
    """
    file = os.path.join(run_dir, LOCK_FILE)
    try:  # without O_NONBLOCK a pipe that somebody put there would be waited for
        return os.open(file, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o644)
    except OSError as e:
        if e.errno == errno.ELOOP:
            raise ValueError(f"{file} is a link; remove it, or set trainer.default_local_dir") from e
        raise


def _check_ours(descriptor: int, run_dir: str) -> None:
    """Refuse a file that is no lock: it would be overwritten. Raises ValueError."""
    status = os.fstat(descriptor)
    text = os.pread(descriptor, 4096, 0) if stat.S_ISREG(status.st_mode) else b"?"
    holder: Any = {}
    with suppress(ValueError, RecursionError):
        holder = json.loads(text or b"{}") if status.st_nlink <= 1 else None
    if not isinstance(holder, dict) or (text and "pid" not in holder):
        file = os.path.join(run_dir, LOCK_FILE)
        raise ValueError(f"{file} is not a run's lock; move it away, or set trainer.default_local_dir")


def _check_links(run_dir: str) -> None:
    """Refuse a link in the folder: the run would write where it leads. Raises ValueError.

    The folder of checkpoints may be a link, to another disk.
    """
    with os.scandir(run_dir) as entries:
        for entry in entries:
            if entry.is_symlink() and not (entry.name == "checkpoints" and entry.is_dir()):
                raise ValueError(
                    f"{entry.path} is a link, and a run writes into no file elsewhere; remove it, or set "
                    f"trainer.default_local_dir"
                )


def _take(descriptor: int, kind: int, run_dir: str, *, remark: bool) -> None:
    """Lock the file, or do without where the filesystem has no locks. Raises ValueError if another run holds it."""
    end = time.monotonic() + PATIENCE
    while True:
        try:
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
            return
        except OSError as e:
            if e.errno in _WITHOUT_LOCKS:
                if remark:
                    text = f"megarl: {run_dir} cannot be locked ({e.strerror}): nothing keeps a second run out"
                    print(text, file=sys.stderr, flush=True)
                return
            if e.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise
        if time.monotonic() > end:
            raise _in_use(run_dir)
        time.sleep(0.05)


def _in_use(run_dir: str) -> ValueError:
    by, (holder, _) = "by another run", holder_of(run_dir)
    if {"pid", "host", "since"} <= holder.keys():
        by = f"by pid {holder['pid']} on host {holder['host']} since {holder['since']}"
    return ValueError(f"{run_dir} is in use {by}: wait for it, stop it, or set trainer.default_local_dir")
