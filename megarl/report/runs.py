"""Finds the runs of a report: folders, names and curves."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megarl.config.load import CONFIG_FILE
from megarl.telemetry.lines import complete_lines
from megarl.telemetry.metrics import find
from megarl.telemetry.sinks.jsonl import METRICS_FILE, read_row


@dataclass(frozen=True, kw_only=True)
class Run:
    """Names a run's folder, with a name that is unique in the report.

    Attributes:
        name: the shortest end of the path that no other run has.
    """

    folder: str
    name: str

    @property
    def metrics_file(self) -> str:
        return os.path.join(self.folder, METRICS_FILE)


def runs_at(folders: Sequence[str], *, may_be_empty: bool = False) -> list[Run]:
    """Find the runs in folders, without repeats.

    Args:
        may_be_empty: accept a run that has begun and has no metrics yet.

    Raises:
        ValueError: a folder holds no run, or the run has no metrics; one line.
    """
    paths = list(dict.fromkeys(os.path.abspath(folder) for folder in folders))
    for path in paths:
        _check(path, may_be_empty)
    return [Run(folder=path, name=name) for path, name in zip(paths, _names(paths), strict=True)]


def _check(folder: str, may_be_empty: bool) -> None:
    if not os.path.isdir(folder):
        problem = "is a file, not a run's folder" if os.path.exists(folder) else "is not there"
        raise ValueError(f"'{folder}' {problem}; name the folder that trainer.default_local_dir gave the run")
    if not os.access(folder, os.R_OK | os.X_OK):
        raise ValueError(f"'{folder}' cannot be read")
    metrics = os.path.join(folder, METRICS_FILE)
    if not os.path.isfile(metrics):
        if may_be_empty and os.path.isfile(os.path.join(folder, CONFIG_FILE)):
            return
        raise ValueError(f"'{folder}' holds no {METRICS_FILE}: no run, or one whose trainer.logger has no jsonl")
    try:
        rows = [row for line in complete_lines(metrics) if (row := read_row(line)) is not None]
    except OSError as e:
        raise ValueError(f"'{metrics}' cannot be read: {e.strerror or e}") from e
    if not rows and not may_be_empty:
        raise ValueError(f"'{metrics}' has no row of metrics that can be read: no step is done yet")


def _names(folders: Sequence[str]) -> list[str]:
    """Shorten paths to ends that differ: a/run and b/run keep both parts, a/x and a/y the last part."""
    parts = [folder.strip(os.sep).split(os.sep) for folder in folders]
    for length in range(1, max(map(len, parts)) + 1):
        names = ["/".join(part[-length:]) for part in parts]
        if len(set(names)) == len(names):
            return names
    return list(folders)


def curves(run: Run) -> dict[str, Any]:
    """Read a run's metric file by column; of several rows of a step the last counts.

    Returns:
        steps: the steps of the rows.
        columns: for each metric the rows that have it (None: all) and its values (None: not finite).
        meanings: meanings of the metrics that the registry knows.
        damaged: number of unreadable lines.
    """
    lines = complete_lines(run.metrics_file)
    by_step: dict[int, dict[str, Any]] = {}
    damaged = 0
    for line in lines:
        row = read_row(line)
        if row is None:
            damaged += 1
        else:
            by_step[row.pop("step")] = row
    rows = [by_step[step] for step in sorted(by_step)]
    columns: dict[str, tuple[list[int], list[float | None]]] = {}
    for place, row in enumerate(rows):
        for name, value in row.items():
            if value is None or (isinstance(value, int | float) and not isinstance(value, bool)):
                places, values = columns.setdefault(name, ([], []))
                places.append(place)
                values.append(_short(value))
    table = {name: (None if len(at) == len(rows) else at, values) for name, (at, values) in columns.items()}
    meanings = {name: f"{spec.meaning} [{spec.unit}]" for name in columns if (spec := find(name))}
    return {"steps": sorted(by_step), "columns": table, "meanings": meanings, "damaged": damaged}


def _short(value: float | None) -> float | None:
    """Round to ten digits, the seconds of a time stamp; None for a value that is not finite or nearly infinite."""
    if value is None or not abs(value) < 1e300:
        return None
    return value if isinstance(value, int) else float(f"{value:.10g}")
