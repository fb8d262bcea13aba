"""`metrics.jsonl`: one JSON object per row."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping

from megarl.telemetry.sinks.resume import complete_lines, rewrite


class JsonlSink:
    """Appends `{"step": ..., metric: value, ...}`; a value that is not finite is written as null."""

    def __init__(self, run_dir: str, first_step: int) -> None:
        os.makedirs(run_dir, exist_ok=True)
        path = os.path.join(run_dir, "metrics.jsonl")
        kept = [line for line in complete_lines(path) if json.loads(line)["step"] < first_step]
        rewrite(path, "".join(kept))
        self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        # NaN and Infinity are not JSON: other readers refuse the whole file
        values = {key: float(value) if math.isfinite(value) else None for key, value in metrics.items()}
        self._file.write(json.dumps({"step": step, **values}) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()
