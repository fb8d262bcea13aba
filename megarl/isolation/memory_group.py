"""Limits the memory of a program with all its processes by a control group, where this process may make one."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from contextlib import suppress

_ROOT, _LIMIT = "/sys/fs/cgroup", "memory.max"
_numbers = itertools.count()


class MemoryGroup:
    """Holds a control group, at first without processes; `close` removes the group, once its processes have ended."""

    def __init__(self, folder: str, limits: dict[str, str], events: str) -> None:
        """
        Args:
            folder: to make; its name ends in this process's id and a number.
            limits: file -> content.
            events: file with a line "oom_kill N".

        Raises:
            OSError: this process may not.
        """
        os.mkdir(folder)
        self._folder, self._events = folder, os.path.join(folder, events)
        try:
            for name, content in limits.items():
                with open(os.path.join(folder, name), "w") as f:
                    f.write(content)
        except OSError:
            os.rmdir(folder)
            raise

    @property
    def processes(self) -> str:
        """Return the path of the file that takes the ids of processes."""
        return os.path.join(self._folder, "cgroup.procs")

    def killed(self) -> bool:
        """Tell whether a process of the group was killed for want of memory."""
        with open(self._events) as f:
            return any(line.startswith("oom_kill ") and int(line.split()[1]) > 0 for line in f)

    def close(self) -> None:
        with suppress(OSError):  # a process that is just ending; the next process to make a group removes it
            os.rmdir(self._folder)


def memory_group(limit: int) -> MemoryGroup | None:
    """Make a control group of at most `limit` bytes; None where none can be made."""
    name = f"megarl-{os.getpid()}-{next(_numbers)}"
    with suppress(OSError):
        for root, path, file in own_groups():
            parent, limits, events = f"{root}{path}", {file: str(limit)}, "memory.oom_control"
            if file == _LIMIT:
                if not os.path.exists(f"{parent}/{file}"):
                    continue
                limits["memory.swap.max"], events = "0", "memory.events"
            if name.endswith("-0"):
                _remove_old(parent)
            with suppress(OSError):
                return MemoryGroup(os.path.join(parent, name), limits, events)
    return None


def own_groups() -> Iterator[tuple[str, str, str]]:
    """Yield the control groups in which this process's memory counts, of either version: where such groups are, the
    group's path there, and the name of the file with its limit."""
    with suppress(OSError), open("/proc/self/cgroup") as f:
        for line in f:
            _, controllers, path = line.rstrip("\n").split(":", 2)
            if controllers == "memory":
                yield f"{_ROOT}/memory", path, "memory.limit_in_bytes"
            elif not controllers:
                yield _ROOT, path, _LIMIT


def _remove_old(parent: str) -> None:
    """Remove the groups of processes that were killed."""
    for name in os.listdir(parent):
        words = name.split("-")
        if words[0] == "megarl" and len(words) == 3 and words[1].isdigit() and not os.path.exists(f"/proc/{words[1]}"):
            with suppress(OSError):  # somebody else has just removed it
                os.rmdir(os.path.join(parent, name))
