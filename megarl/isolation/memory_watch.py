"""Measures the memory that a program holds with all its processes, where no control group can be made."""

from __future__ import annotations

import os

INTERVAL = 0.02
"""Seconds between two looks."""
_PAGE = os.sysconf("SC_PAGE_SIZE")


def held(pid: int, *, over: int) -> bool:
    """Tell whether a process and its descendants hold more than `over` bytes together.

    The sum of their resident memory counts a shared page once for each of them; where that is too much, the sum of
    their proportional parts decides.
    """
    processes = _family(pid)
    return sum(map(_resident, processes)) > over and sum(map(_proportional, processes)) > over


def _family(pid: int) -> list[str]:
    family, unseen = list[str](), [str(pid)]
    while unseen:
        process = unseen.pop()
        family.append(process)
        try:
            threads = os.listdir(f"/proc/{process}/task")
        except OSError:  # it has ended
            continue
        for thread in threads:
            unseen += _read(f"/proc/{process}/task/{thread}/children")
    return family


def _resident(process: str) -> int:
    pages = _read(f"/proc/{process}/statm")
    return int(pages[1]) * _PAGE if pages else 0


def _read(path: str) -> list[str]:
    try:
        with open(path) as f:
            return f.read().split()
    except OSError:  # it has ended
        return []


def _proportional(process: str) -> int:
    try:
        with open(f"/proc/{process}/smaps_rollup") as f:
            return sum(int(line.split()[1]) << 10 for line in f if line.startswith("Pss:"))
    except OSError:  # it forbids inspection
        return _resident(process)
