"""The benchmark of telemetry runs, and its shares are those of what it prints."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_run import ROOT, write_run


@pytest.mark.slow
def test_telemetry_is_measured_within_one_run(tmp_path: Path) -> None:
    config = write_run(tmp_path)
    done = subprocess.run(
        [sys.executable, "tools/bench_telemetry.py", str(config), "trainer.total_training_steps=12"],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
    assert figures["steps"] == 12 - 5
    counted = ("RunRecords.step", "Report.samples", "Report.trained_on")
    assert set(figures["seconds"]) == {
        f"{name} {kind}" for name in (*counted, "Report.step") for kind in ("wall", "cpu")
    }
    assert 0 < figures["seconds"]["Report.step cpu"] < figures["seconds"]["RunRecords.step cpu"]
    cpu = sum(figures["seconds"][f"{name} cpu"] for name in counted)
    assert figures["shares"]["of_step"] == pytest.approx(cpu / figures["step_s"])
    assert 0 < figures["shares"]["of_step"] < 0.1 and figures["shares"]["of_step_with_threads"] < 1
