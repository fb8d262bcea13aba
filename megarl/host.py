"""What this machine has for the processes of a job. Torch-free."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress

import psutil

_GROUPS = "/sys/fs/cgroup"


def host_memory() -> int:
    """Bytes that this process and those beside it can hold: the machine's, or less where a control group says so."""
    return min([psutil.virtual_memory().total, *_limits()])


def cpu_rank_memory() -> int:
    """This rank's part of it, where CPU ranks train."""
    return host_memory() // int(os.environ.get("LOCAL_WORLD_SIZE", 1))


def _limits() -> Iterator[int]:
    """What this process's control group and those above it allow; both versions of control groups."""
    with suppress(OSError), open("/proc/self/cgroup") as f:
        for line in f:
            _, controllers, path = line.rstrip("\n").split(":", 2)
            if "memory" in controllers.split(","):
                yield from _limits_above(f"{_GROUPS}/memory", path, "memory.limit_in_bytes")
            elif not controllers:
                yield from _limits_above(_GROUPS, path, "memory.max")


def _limits_above(root: str, path: str, name: str) -> Iterator[int]:
    parts = [part for part in path.split("/") if part]
    for depth in range(len(parts) + 1):
        with suppress(OSError, ValueError), open(os.path.join(root, *parts[:depth], name)) as f:
            yield int(f.read())  # a ValueError is the word "max": no limit
