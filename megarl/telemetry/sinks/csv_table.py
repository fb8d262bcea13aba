"""Writes `metrics.csv`: a table that is rewritten with a wider header when a new metric appears."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Iterable, Mapping

from megarl.telemetry.lines import LineFile, Say, complete_lines, keep, rewrite

Row = Mapping[str, object]


class CsvSink:
    """Writes metrics as columns in order of first appearance, `step` first. A missing metric is an empty cell."""

    def __init__(self, run_dir: str, first_step: int, say: Say) -> None:
        os.makedirs(run_dir, exist_ok=True)
        self._path = os.path.join(run_dir, "metrics.csv")
        lines = complete_lines(self._path)
        columns = _cells(lines[0]) if lines else []
        if not columns or columns[0] != "step":
            columns = []  # without a header no line can be read
        rows = [(line, row) for line in lines[1:] if (row := _row(columns, line)) is not None]
        damaged = len(lines) - len(rows) - bool(columns)
        kept = [(line, row) for line, row in rows if int(row["step"]) < first_step]
        self._columns = columns if kept else ["step"]
        header = lines[:1] if kept else [_text([self._columns])]
        keep(self._path, [*header, *(line for line, _ in kept)], damaged=damaged, say=say)
        self._file = LineFile(self._path)
        self._waiting: list[Row] = []  # rows that need a wider table, for which the disk has no room yet

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        row = {"step": step, **{key: float(value) for key, value in metrics.items()}}
        new = [key for waiting in (*self._waiting, row) for key in waiting if key not in self._columns]
        if not new:
            self._file.append(_text([self._cells_of(row)]).decode())
            return
        self._waiting.append(row)
        self._widen(list(dict.fromkeys(new)))

    def close(self) -> None:
        if self._waiting:
            self._widen(list(dict.fromkeys(k for row in self._waiting for k in row if k not in self._columns)))
        self._file.close()

    def _widen(self, new: list[str]) -> None:
        """Rewrite the table with more columns and the waiting rows."""
        self._file.append("")  # write pending rows first
        lines = complete_lines(self._path)
        before = [row for line in lines[1:] if (row := _row(self._columns, line)) is not None]
        columns = [*self._columns, *new]
        table = [[row.get(name, "") for name in columns] for row in (*before, *self._waiting)]
        rewrite(self._path, _text([columns, *table]))
        self._columns, self._waiting = columns, []
        self._file.close()
        self._file = LineFile(self._path)

    def _cells_of(self, row: Row) -> list[object]:
        return [row.get(name, "") for name in self._columns]


def _text(table: Iterable[Iterable[object]]) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(table)
    return text.getvalue().encode()


def _cells(line: bytes) -> list[str]:
    """Split a line into cells; [] if it is not CSV."""
    try:
        (cells,) = csv.reader([line.decode()], strict=True)
    except (ValueError, csv.Error):
        return []
    return cells


def _row(columns: list[str], line: bytes) -> dict[str, str] | None:
    """Parse a line; None if it is no row of numbers with these columns."""
    cells = _cells(line)
    try:
        int(cells[0])
        for cell in filter(None, cells):
            float(cell)
    except (IndexError, ValueError):
        return None
    return dict(zip(columns, cells, strict=True)) if len(cells) == len(columns) else None
