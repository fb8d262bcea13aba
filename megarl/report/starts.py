"""Makes the table of a run's starts."""

from __future__ import annotations

import os
from typing import Any

from megarl.report.runs import Run
from megarl.trainer.run_lock import LOCK_FILE, holder_of
from megarl.trainer.starts import STARTS, past_starts, read_parent

MOST_SHOWN = 100
"""Starts in the table: the newest ones."""


def start_files(run: Run) -> list[str]:
    """List the paths whose changes change the table. A note of a start is a new file in its folder."""
    folder = os.path.join(run.folder, STARTS)
    try:
        newest = sorted(os.listdir(folder))[-1:]
    except OSError:
        newest = []
    return [folder, *(os.path.join(folder, name) for name in newest), os.path.join(run.folder, LOCK_FILE)]


def starts(run: Run) -> dict[str, Any]:
    """Describe the newest starts of a run.

    Returns:
        total: number of starts.
        gpu_hours: over all starts; 0: none of them was on GPUs.
        parent: checkpoint of another run that this run began from; empty: none.
        rows: for each start its number, begin (seconds since 1970), seconds, how it ended, user, hosts, ranks, version
            and commit of megarl, checkpoint, command.
    """
    running = holder_of(run.folder)[1]
    past = past_starts(run.folder, running=running)
    parent = read_parent(run.folder).get("checkpoint")
    rows = []
    for start in past[-MOST_SHOWN:]:
        ended = start.ended or ("goes on" if running and start is past[-1] else "without a word")
        hosts = ", ".join(f"{host} ({devices})" for host, devices in start.hosts.items())
        row = [start.number, start.began, start.seconds, ended, start.user, hosts, start.ranks, start.code]
        rows.append([*row, start.checkpoint, start.command])
    return {
        "total": len(past),
        "gpu_hours": sum(start.gpu_hours for start in past),
        "parent": parent if isinstance(parent, str) else "",
        "rows": rows,
    }
