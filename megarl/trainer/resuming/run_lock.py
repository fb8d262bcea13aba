"""RUN/lock: a run folder belongs to one run at a time. The file says whose it is, and how the last one ended.

{"host": "node7", "pid": 123, "since": "2026-01-31 12:00", "steps": 500, "ended": "finished"}
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import sys
import time
from contextlib import suppress
from datetime import datetime
from typing import Any

LOCK_FILE = "lock"
PATIENCE = 1.0  # seconds: a process that was killed holds its lock for a moment more, and so does one that only looks
_WITHOUT_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOLCK)


class RunLock:
    """Holds a run folder until this process ends; the kernel gives it back, however the process ends."""

    def __init__(self, run_dir: str, *, steps: int | None = None) -> None:
        """
        Args:
            steps: of the whole run.

        Raises:
            ValueError: another run is in the folder; names it and says what to change.
        """
        os.makedirs(run_dir, exist_ok=True)
        file = os.path.join(run_dir, LOCK_FILE)
        # a descriptor that Python opens is closed in programs that this process starts; see below for forked helpers
        self._descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            _take(self._descriptor, fcntl.LOCK_EX, run_dir, remark=True)
        except ValueError:
            os.close(self._descriptor)
            raise
        # A helper that outlives this process would keep the folder locked.
        os.register_at_fork(after_in_child=self._close)
        since = datetime.now().strftime("%Y-%m-%d %H:%M")
        self._holder = {"host": socket.gethostname(), "pid": os.getpid(), "since": since, "steps": steps}
        self._write()

    def note_end(self, how: str) -> None:
        """Write down how the run ended, in a line such as "finished"; the folder is still held."""
        self._holder["ended"] = how
        with suppress(OSError):  # a full disk: then nobody knows
            self._write()

    def release(self) -> None:
        """Give the folder back before the process ends."""
        self._close()

    def _write(self) -> None:
        written = json.dumps(self._holder).encode()
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, written, 0)

    def _close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def check_free(run_dir: str) -> None:
    """Raises ValueError if a run is in the folder; leaves nothing there and holds nothing."""
    file = os.path.join(run_dir, LOCK_FILE)
    try:
        descriptor = os.open(file, os.O_RDONLY)
    except OSError:
        return
    try:
        _take(descriptor, fcntl.LOCK_SH, run_dir, remark=False)
    finally:
        os.close(descriptor)


def holder_of(run_dir: str) -> tuple[dict[str, Any], bool]:
    """What the lock's file says, empty if there is none, and whether a run holds the folder now."""
    file = os.path.join(run_dir, LOCK_FILE)
    try:
        descriptor = os.open(file, os.O_RDONLY)
    except OSError:
        return {}, False
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            held = False
        except OSError as e:
            held = e.errno in (errno.EWOULDBLOCK, errno.EACCES)
        holder: Any = {}
        with suppress(OSError, ValueError):
            holder = json.loads(os.pread(descriptor, 4096, 0))
        return (holder if isinstance(holder, dict) else {}), held
    finally:
        os.close(descriptor)


def _take(descriptor: int, kind: int, run_dir: str, *, remark: bool) -> None:
    """Lock the file, or go without where the filesystem has no locks; raises ValueError if another run holds it."""
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
    by = "by another run"
    with suppress(OSError, ValueError, KeyError), open(os.path.join(run_dir, LOCK_FILE), encoding="utf-8") as f:
        holder = json.load(f)
        by = f"by pid {holder['pid']} on host {holder['host']} since {holder['since']}"
    return ValueError(f"{run_dir} is in use {by}: wait for it, stop it, or set trainer.default_local_dir")
