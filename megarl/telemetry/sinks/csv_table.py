"""`metrics.csv`: one table, whose header grows when a new metric appears."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Iterable, Mapping

from megarl.telemetry.sinks.resume import complete_lines, rewrite


class CsvSink:
    """Columns in order of first appearance, `step` first; a metric that a row lacks is an empty cell."""

    def __init__(self, run_dir: str, first_step: int) -> None:
        os.makedirs(run_dir, exist_ok=True)
        self._path = os.path.join(run_dir, "metrics.csv")
        reader = csv.DictReader(complete_lines(self._path))
        kept = [row for row in reader if int(row["step"]) < first_step]
        self._columns = list(kept[0]) if kept else ["step"]
        self._rewrite(kept)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        new = [key for key in metrics if key not in self._columns]
        if new:
            rows = list(csv.DictReader(complete_lines(self._path)))
            self._columns += new
            self._file.close()
            self._rewrite(rows)
        self._writer.writerow({"step": step, **{key: float(value) for key, value in metrics.items()}})
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def _rewrite(self, rows: Iterable[Mapping[str, str]]) -> None:
        text = io.StringIO()
        writer = csv.DictWriter(text, self._columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        rewrite(self._path, text.getvalue())
        self._file = open(self._path, "a", encoding="utf-8", newline="")  # noqa: SIM115
        self._writer = csv.DictWriter(self._file, self._columns, lineterminator="\n")
