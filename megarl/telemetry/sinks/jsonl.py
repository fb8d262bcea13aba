"""Writes and reads `metrics.jsonl`: one JSON object per row."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from typing import Any

from megarl.telemetry.lines import LineFile, Say, complete_lines, keep

METRICS_FILE = "metrics.jsonl"
"""Name of the file in a run's folder."""
TAIL = 256 * 2**10
"""Bytes at the end of a metric file that `last_rows` reads."""


class JsonlSink:
    """Appends `{"step": ..., metric: value, ...}`. A value that is not finite is written as null."""

    def __init__(self, run_dir: str, first_step: int, say: Say) -> None:
        os.makedirs(run_dir, exist_ok=True)
        path = os.path.join(run_dir, METRICS_FILE)
        lines = complete_lines(path)
        rows = [(line, row) for line in lines if (row := read_row(line)) is not None]
        kept = [line for line, row in rows if row["step"] < first_step]
        keep(path, kept, damaged=len(lines) - len(rows), say=say)
        self._file = LineFile(path)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        # NaN and Infinity are not JSON: other readers refuse the whole file
        values = {key: float(value) if math.isfinite(value) else None for key, value in metrics.items()}
        self._file.append(json.dumps({"step": step, **values}) + "\n")

    def close(self) -> None:
        self._file.close()


def read_row(line: bytes) -> dict[str, Any] | None:
    """Parse a line of the file; None if it is no row."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) and type(row.get("step")) is int else None


def last_rows(file: str) -> list[dict[str, Any]]:
    """Read the rows at the end of a metric file, the newest first. A half-written line is left out."""
    if not os.path.isfile(file):  # reading a pipe would not end
        return []
    try:
        with open(file, "rb") as f:
            f.seek(max(0, os.fstat(f.fileno()).st_size - TAIL))
            lines = f.read(TAIL).splitlines()
    except OSError:
        return []
    rows = []
    for line in reversed(lines):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(row, dict):
            rows.append(row)
    return rows
