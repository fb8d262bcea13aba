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
_WITHOUT_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOLCK)


class RunLock:
    """Holds a run folder until this process ends; the kernel gives it back, however the process ends."""

    def __init__(self, run_dir: str, *, patience: float = 1.0) -> None:
        """
        Args:
            patience: seconds to try for: a launcher that looks whether the folder is free holds it for a moment.

        Raises:
            ValueError: another run is in the folder; names it and says what to change.
        """
        os.makedirs(run_dir, exist_ok=True)
        file = os.path.join(run_dir, LOCK_FILE)
        # a descriptor that Python opens is closed in programs that this process starts; see below for forked helpers
        self._descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o644)
        end = time.monotonic() + patience
        while not _locked(self._descriptor, fcntl.LOCK_EX, file):
            if time.monotonic() > end:
                os.close(self._descriptor)
                raise _in_use(run_dir)
            time.sleep(0.05)
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
        if not _locked(descriptor, fcntl.LOCK_SH, None):
            raise _in_use(run_dir)
    finally:
        os.close(descriptor)


def _locked(descriptor: int, kind: int, file: str | None) -> bool:
    """Whether the lock was taken, or cannot be: a filesystem without locks gets a remark if `file` is given."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except OSError as e:
        if e.errno in _WITHOUT_LOCKS:
            if file is not None:
                remark = f"megarl: '{file}' cannot be locked ({e.strerror}): nothing keeps a second run out"
                print(remark, file=sys.stderr, flush=True)
            return True
        if e.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return False
        raise
    return True


def _in_use(run_dir: str) -> ValueError:
    by = "by another run"
    with suppress(OSError, ValueError, KeyError), open(os.path.join(run_dir, LOCK_FILE), encoding="utf-8") as f:
        holder = json.load(f)
        by = f"by pid {holder['pid']} on host {holder['host']} since {holder['since']}"
    return ValueError(f"{run_dir} is in use {by}: wait for it, stop it, or set trainer.default_local_dir")
