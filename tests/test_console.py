"""Output that cannot be written, or not as it is: runs go on, commands end as shells expect."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from selection import quick
from tiny_run import ROOT, megarl, metrics_of, write_run

COMMAND = [sys.executable, "-m", "megarl.cli.main"]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
ARROW = (
    "def score(response, row):\n    if len(response) % 2:\n        raise ValueError('→ no number')\n    return 1.0\n"
)


@pytest.mark.parametrize("lost", ["stdout", "both"])
@pytest.mark.slow
@pytest.mark.parametrize("by", ["a full disk", "a reader that left"])
def test_a_run_goes_on_when_its_output_cannot_be_written(tmp_path: Path, by: str, lost: str) -> None:
    config = write_run(tmp_path, trainer__save_freq=2)
    read, write = os.pipe()
    os.close(read)
    full = os.open("/dev/full", os.O_WRONLY)
    nowhere = full if by == "a full disk" else write
    try:
        done = subprocess.run(
            [*COMMAND, "train", str(config)],
            env=ENVIRONMENT,
            stdout=nowhere,
            stderr=nowhere if lost == "both" else subprocess.PIPE,
            text=True,
            timeout=500,
        )
    finally:
        os.close(write)
        os.close(full)
    assert done.returncode == 0 and len(metrics_of(tmp_path)) == 3
    assert (tmp_path / "run" / "checkpoints" / "global_step_2").is_dir()
    if lost == "stdout":
        reason = "No space left on device" if by == "a full disk" else "Broken pipe"
        assert done.stderr.count(f"megarl: warning: output is lost ({reason}); the run goes on") == 1, done.stderr


@pytest.mark.slow
def test_a_run_without_streams_writes_its_files_alone(tmp_path: Path) -> None:
    """A file that is opened where stdout was would take what libraries print."""
    config = write_run(tmp_path, trainer__save_freq=2, trainer__logger=["console", "jsonl"])
    closed = ["bash", "-c", 'exec "$@" <&- >&- 2>&-', "bash"]
    done = subprocess.run([*closed, *COMMAND, "train", str(config)], env=ENVIRONMENT, timeout=500)
    assert done.returncode == 0 and len(metrics_of(tmp_path)) == 3
    assert (tmp_path / "run" / "checkpoints" / "global_step_2").is_dir()


@pytest.mark.slow
def test_a_terminal_that_lacks_a_character_gets_an_escape(tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text(ARROW)
    config = write_run(tmp_path, reward={"name": f"{tmp_path / 'reward.py'}:score", "on_error": "drop", "trial": 0})
    done = megarl("train", str(config), PYTHONIOENCODING="latin-1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "\\u2192 no number" in done.stdout + done.stderr
    planned = megarl("plan", str(config), PYTHONIOENCODING="latin-1")
    assert planned.returncode == 0 and "\\u2026 from other nodes" in planned.stdout, planned.stderr


@pytest.mark.parametrize(
    "words",
    quick([["plan", "configs/quickstart.yaml"], ["algorithms"], ["config", "print", "configs/quickstart.yaml"]], 1),
)
def test_a_command_ends_when_nobody_reads_on(words: list[str]) -> None:
    """Like every other program: 141, and not a line about it."""
    read, write = os.pipe()
    os.close(read)
    try:
        done = subprocess.run([*COMMAND, *words], env=ENVIRONMENT, stdout=write, stderr=subprocess.PIPE, cwd=ROOT)
    finally:
        os.close(write)
    assert (done.returncode, done.stderr) == (141, b"")
