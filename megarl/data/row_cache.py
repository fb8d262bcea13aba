"""Keeps what was read of the data in folders: made by one process, used by all, whole or not there. Torch-free.

CACHE/3f2a...          an entry, renamed to its name when it is whole
CACHE/3f2a....lock     held by the process that makes it; the kernel gives it back, however the process ends
CACHE/3f2a....tmp-*    an entry in the making
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

STALLED_SECONDS = 600.0
"""How long a process that makes an entry may show no progress before others give up on it."""

SAY_AFTER_SECONDS = 5.0
_META = "meta.json"
_IN_THE_MAKING = re.compile(r"[0-9a-f]{24,64}\.tmp-\w+")
_WITHOUT_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOLCK)

Progress = Callable[[], None]
"""To be called now and then while an entry is made."""


def cache_folder(configured: str) -> Path:
    """Return `data.cache_dir`, or the user's cache folder: it outlives the run's, and other runs read the same rows."""
    if configured:
        return Path(configured)
    home = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(home) / "megarl" / "rows"


def entry(folder: Path, key: str, what: str, make: Callable[[Path, Progress], dict[str, object]]) -> Path:
    """Return the entry of a key; the first of all processes that ask for it makes it, if it is not there.

    Args:
        what: the configuration key that names the files, for messages.
        make: writes files into an empty folder; returns what goes into the entry's meta.json.

    Raises:
        ValueError: what `make` raises; a folder that cannot be written; a process that makes it and is stuck.
    """
    if is_whole(folder / key):
        return folder / key
    try:
        os.makedirs(folder, exist_ok=True)
        with _locked(folder / f"{key}.lock", what) as progress:
            if not is_whole(folder / key):
                _make(folder, key, make, progress)
    except OSError as e:
        raise ValueError(
            f"{what}: the rows cannot be kept in '{folder}': {e.strerror or e}; set data.cache_dir to a folder with "
            f"more room, or one that can be written to"
        ) from e
    return folder / key


def meta_of(folder: Path) -> dict[str, object]:
    """Read an entry's meta.json; raises ValueError if it is damaged."""
    digest, _, text = (folder / _META).read_bytes().partition(b"\n")
    if digest != _digest(text):
        raise ValueError(f"'{folder / _META}' is not what was written")
    meta: dict[str, object] = json.loads(text)
    return meta


def is_whole(folder: Path) -> bool:
    """Tell whether an entry is there with every byte of its files."""
    try:
        sizes = meta_of(folder)["sizes"]
        assert isinstance(sizes, dict)
        return all(os.path.getsize(folder / name) == size for name, size in sizes.items())
    except (OSError, ValueError, KeyError, AssertionError):
        return False


def _make(folder: Path, key: str, make: Callable[[Path, Progress], dict[str, object]], progress: Progress) -> None:
    partial = Path(tempfile.mkdtemp(prefix=f"{key}.tmp-", dir=folder))
    try:
        meta = make(partial, progress)
        sizes = {path.name: path.stat().st_size for path in partial.iterdir()}
        text = json.dumps({**meta, "sizes": sizes}).encode()
        (partial / _META).write_bytes(_digest(text) + b"\n" + text)
        for path in partial.iterdir():
            _flush(path)
        shutil.rmtree(folder / key, ignore_errors=True)  # one that is not whole
        try:
            os.rename(partial, folder / key)
        except OSError:
            if not is_whole(folder / key):  # where nothing can be locked, another process may have been first
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _digest(text: bytes) -> bytes:
    return hashlib.blake2b(text, digest_size=16).hexdigest().encode()


def _flush(path: Path) -> None:
    """Write a file through to the disk: a machine that loses power has an entry whole or not at all."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove_leftovers(lock: Path) -> None:
    """Remove the half-made entries of processes that were killed: of this lock, and of others that nobody holds."""
    for left in lock.parent.glob("*.tmp-*"):
        if not _IN_THE_MAKING.fullmatch(left.name):  # somebody else's
            continue
        other = lock.with_name(f"{left.name.partition('.tmp-')[0]}.lock")
        if other == lock:
            shutil.rmtree(left, ignore_errors=True)
            continue
        with suppress(OSError):
            descriptor = os.open(other, os.O_RDWR | os.O_CREAT, 0o644)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(left, ignore_errors=True)
            finally:
                os.close(descriptor)


@contextmanager
def _locked(file: Path, what: str) -> Iterator[Progress]:
    """Hold a lock; whoever waits for it looks whether the holder still makes progress."""
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        if _wait_for(descriptor, file, what):
            _remove_leftovers(file)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"pid {os.getpid()} on {socket.gethostname()}".encode(), 0)
        yield lambda: os.utime(descriptor)
    finally:
        os.close(descriptor)


def _wait_for(descriptor: int, file: Path, what: str) -> bool:
    """Wait for the lock; return whether it is held: where file systems have none, every process makes its own entry."""
    began, has_told = time.monotonic(), False
    last_seen, seen_at = 0, began
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except OSError as e:
            if e.errno in _WITHOUT_LOCKS:
                return False
            if e.errno not in (errno.EWOULDBLOCK, errno.EACCES, errno.EINTR):
                raise
        now, changed = time.monotonic(), os.fstat(descriptor).st_mtime_ns
        if changed != last_seen:
            last_seen, seen_at = changed, now
        holder = file.read_text() or "another process"
        if now - seen_at > STALLED_SECONDS:
            raise ValueError(
                f"{what}: {holder} reads the rows, without progress for {STALLED_SECONDS / 60:g} minutes; end it, or "
                f"set another data.cache_dir"
            )
        if not has_told and now - began > SAY_AFTER_SECONDS:
            print(f"megarl: {what}: {holder} reads the rows; waiting for it", file=sys.stderr, flush=True)
            has_told = True
        time.sleep(0.1)
