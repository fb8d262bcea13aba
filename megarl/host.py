"""Measures what this machine has for the processes of a job, and names their user. Torch-free."""

from __future__ import annotations

import getpass
import os
from collections.abc import Iterator
from contextlib import suppress

import psutil

from megarl.isolation.memory_group import own_groups


def host_memory() -> int:
    """Return the bytes that the processes of this host can hold: the machine's, or a control group's if less."""
    limits = (limit for group in own_groups() for limit in _limits_above(*group))
    return min([psutil.virtual_memory().total, *limits])


def cpu_rank_memory() -> int:
    """Return this rank's part of the host's memory, in bytes, where CPU ranks train."""
    return host_memory() // int(os.environ.get("LOCAL_WORLD_SIZE", 1))


def user_name() -> str:
    """Return the name of the user of this process, or the number where no name is known."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container knows the number alone
        return str(os.getuid())


def _limits_above(root: str, path: str, name: str) -> Iterator[int]:
    """Yield the limits of a control group and of the groups around it."""
    parts = [part for part in path.split("/") if part]
    for depth in range(len(parts) + 1):
        with suppress(OSError, ValueError), open(os.path.join(root, *parts[:depth], name)) as f:
            yield int(f.read())  # a ValueError is the word "max": no limit
