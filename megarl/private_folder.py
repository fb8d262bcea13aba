"""Makes temporary folders of one process: no other user can enter them, and they do not long outlive a killed one."""

from __future__ import annotations

import fcntl
import glob
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache

_SURELY_LOCKED = 60.0  # seconds after which whoever made a folder has locked it


@contextmanager
def private_folder(prefix: str, parent: str | None = None) -> Iterator[str]:
    """Make a folder that is gone afterwards. Folders with its prefix that killed processes left are removed before.

    Args:
        parent: folder to make it in; default the one for temporary files.
    """
    parent = parent or tempfile.gettempdir()
    _remove_what_was_left(parent, prefix)
    with tempfile.TemporaryDirectory(prefix=prefix, dir=parent, ignore_cleanup_errors=True) as folder, _locked(folder):
        yield folder


@cache
def _remove_what_was_left(parent: str, prefix: str) -> None:
    for folder in glob.glob(os.path.join(glob.escape(parent), f"{prefix}*")):
        with suppress(OSError):
            if time.time() - os.lstat(folder).st_mtime > _SURELY_LOCKED:
                with _locked(folder):
                    shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _locked(folder: str) -> Iterator[None]:
    """Hold the lock of a folder of this user; raises OSError if it is another's, or another process holds the lock."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if os.fstat(descriptor).st_uid != os.geteuid():
            raise PermissionError(folder)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)
