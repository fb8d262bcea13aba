"""Writes and reads `timeline/`: the phases of each rank over time, one step a line. Torch-free."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from typing import Any

from megarl.telemetry.lines import LineFile, complete_lines, rewrite
from megarl.telemetry.sinks.jsonl import read_row

MOST_BYTES = 16 * 2**20
"""Size limit of each of the two files: when the newer one is full, it replaces the older one."""

_OLDER, _NEWER = "older.jsonl", "newer.jsonl"

RankSpans = Sequence[tuple[int, float, float]]
"""The spans of one rank: (index of the phase's name, seconds after the step's beginning, seconds)."""


class SpanFile:
    """Writes the spans of a run's newest steps.

    The first row that is written drops the rows of its step and of later ones: a run that resumes or goes back makes
    these steps again.
    """

    def __init__(self, run_dir: str, most_bytes: int = MOST_BYTES) -> None:
        self._folder, self._most_bytes = os.path.join(run_dir, "timeline"), most_bytes
        self._file: LineFile | None = None
        self._written = 0

    def write(self, step: int, loop: str, began: float, phases: Sequence[str], ranks: Sequence[RankSpans]) -> None:
        """Append a step.

        Args:
            began: start of the step, seconds since 1970 by rank 0's clock.
            phases: names to which the spans refer.

        Raises:
            OSError: the row is not written (the disk is full, say). The next call tries again.
        """
        if self._file is None:
            self._file = self._open(step)
        flat = [[number for span in spans for number in span] for spans in ranks]
        row = {"step": step, "loop": loop, "began": round(began, 3), "phases": list(phases), "ranks": flat}
        line = json.dumps(row, separators=(",", ":")) + "\n"
        self._file.append(line)
        self._written += len(line)
        if self._written > self._most_bytes:
            self.close()
            os.replace(self._path(_NEWER), self._path(_OLDER))
            self._file, self._written = LineFile(self._path(_NEWER)), 0

    def close(self) -> None:
        """Close the file. The next `write` opens it again."""
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def _open(self, first_step: int) -> LineFile:
        os.makedirs(self._folder, exist_ok=True)
        for name in (_OLDER, _NEWER):
            lines = complete_lines(self._path(name))
            kept = [line for line in lines if (row := read_row(line)) is not None and row["step"] < first_step]
            if os.path.exists(self._path(name)) and sum(map(len, kept)) < os.path.getsize(self._path(name)):
                rewrite(self._path(name), b"".join(kept))
            self._written = sum(map(len, kept))
        return LineFile(self._path(_NEWER))

    def _path(self, name: str) -> str:
        return os.path.join(self._folder, name)


def span_files(run_dir: str) -> list[str]:
    """List the timeline files that exist, the older one first."""
    paths = (os.path.join(run_dir, "timeline", name) for name in (_OLDER, _NEWER))
    return [path for path in paths if os.path.exists(path)]


def read_spans(line: bytes) -> dict[str, Any] | None:
    """Parse a line of the timeline files; None if it is damaged."""
    row = read_row(line)
    if row is None or not isinstance(row.get("ranks"), list) or not isinstance(row.get("phases"), list):
        return None
    whole = _is_number(row.get("began")) and all(_is_of_rank(spans, len(row["phases"])) for spans in row["ranks"])
    return row if whole else None


def _is_of_rank(spans: Any, phases: int) -> bool:
    if not isinstance(spans, list) or len(spans) % 3 or not all(map(_is_number, spans)):
        return False
    return all(type(place) is int and 0 <= place < phases for place in spans[::3])


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < 1e12


def newest(rows: Iterator[dict[str, Any]], most: int) -> list[dict[str, Any]]:
    """Keep the `most` newest steps, each by its row that was written last."""
    by_step: dict[int, dict[str, Any]] = {}
    for row in rows:
        by_step.pop(row["step"], None)
        by_step[row["step"]] = row
    return list(by_step.values())[-most:]
