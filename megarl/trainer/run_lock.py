"""RUN/lock: a run folder belongs to one run at a time."""

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

LOCK_FILE = "lock"
PATIENCE = 1.0  # seconds: a process that was killed holds its lock for a moment more, and so does one that only looks
_WITHOUT_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOLCK)


class RunLock:
    """Holds a run folder until this process ends; the kernel gives it back, however the process ends."""

    def __init__(self, run_dir: str) -> None:
        """
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
        holder = json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "since": since}).encode()
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, holder, 0)

    def release(self) -> None:
        """Give the folder back before the process ends."""
        self._close()

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
