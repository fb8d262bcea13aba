"""Keeps parts of checkpoints on a node's own disk until they are copied into the run's folder, which may be slow.

LOCAL/megarl-UID-DIGEST/global_step_20/   this node's files of a checkpoint that is not whole in RUN/checkpoints yet
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterable, Mapping
from contextlib import suppress

from megarl.checkpoint.manifest import FileRecord


def local_folder(local_dir: str, run_dir: str) -> str:
    """Name the folder of a run on a node's own disk: each user and each run has another."""
    digest = hashlib.blake2b(os.path.realpath(run_dir).encode(), digest_size=8).hexdigest()
    return os.path.join(local_dir, f"megarl-{os.geteuid()}-{digest}")


def take(folder: str) -> None:
    """Make a folder of `local_folder` or below it, which nobody else can enter.

    Raises:
        OSError: it cannot be made, or somebody else has made it.
    """
    of_run = os.path.dirname(folder)
    os.makedirs(os.path.dirname(of_run), exist_ok=True)
    for path in (of_run, folder):
        with suppress(FileExistsError):
            os.mkdir(path, 0o700)
        if os.lstat(path).st_uid != os.geteuid() or not os.path.isdir(path) or os.path.islink(path):
            raise PermissionError(f"{path} is not this user's folder; set checkpoint.local_dir")


def copy_over(folder: str, target: str, names: Iterable[str]) -> None:
    """Copy files from this node's disk to a folder that all nodes see, and delete each one here. Raises OSError."""
    for name in names:
        source, path = os.path.join(folder, name), os.path.join(target, name)
        _copy(source, path)
        os.unlink(source)
    with suppress(OSError):  # another rank of this node has files in it
        os.rmdir(folder)


def bring_missing(folder: str, target: str, records: Mapping[str, FileRecord]) -> None:
    """Copy the files that a checkpoint lacks from what a dead job has left on this node."""
    for name, record in records.items():
        source, path = os.path.join(folder, name), os.path.join(target, name)
        with suppress(OSError):  # then the checkpoint stays unfinished
            if os.lstat(source).st_size == record.size and not _has(path, record.size):
                _copy(source, path)


def forget(of_run: str) -> None:
    """Delete what dead jobs of a run have left on this node."""
    if not os.path.islink(of_run):
        shutil.rmtree(of_run, ignore_errors=True)


def _copy(source: str, path: str) -> None:
    shutil.copyfile(source, path, follow_symlinks=False)
    with open(path, "rb") as f:
        os.fsync(f.fileno())


def _has(path: str, size: int) -> bool:
    return os.path.exists(path) and os.stat(path).st_size == size
