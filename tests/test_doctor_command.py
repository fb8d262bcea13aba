"""`megarl doctor`: this machine, one without packages, versions that do not work, and data between ranks."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from test_commands import COMMAND, ENVIRONMENT, QUICKSTART, lines_of
from tiny_run import ROOT


def test_the_doctor_on_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    lines = lines_of(capsys, "doctor")
    assert lines[-1] == "A run can work here." and lines[0] == "Packages"
    assert f"  ok      python: {'.'.join(map(str, sys.version_info[:3]))}" in lines
    assert f"  ok      torch: {version('torch')}" in lines
    for name in ("wandb", "mlflow", "prometheus"):  # tools of the tests; of MLflow the smaller package
        assert any(line.startswith("  ok") and line.endswith(f"trainer.logger=[{name}]") for line in lines), lines
    memory = next(line for line in lines if "memory of programs: " in line)
    assert "a control group holds each to its limit" in memory or "what it keeps in /tmp comes on top" in memory
    marks = {line[2:10].strip() for line in lines if line.startswith("  ") and not line.startswith("          ")}
    assert marks <= {"ok", "-"}


def test_the_doctor_where_nothing_is_installed() -> None:
    """Python without its site-packages: each package with the command that installs it; other commands say so, too."""
    bare = [sys.executable, "-S", "-m", "megarl.cli.main"]
    done = subprocess.run([*bare, "doctor"], cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr == ""
    lines = done.stdout.splitlines()
    at = lines.index("  MISSING torch: not installed")
    assert lines[at + 1] == "          -> pip install 'torch>=2.11,<2.14'"
    assert lines[-1].startswith("A run cannot work here: torch, megatron-core, transformers")
    done = subprocess.run([*bare, "plan", QUICKSTART], cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert re.match(r"megarl: error: the package \w+ is not installed; `megarl doctor` says how to\n", done.stderr)


def test_a_slurm_that_does_not_answer_is_not_ok(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from megarl.diagnosis.finding import State
    from megarl.diagnosis.machine import scheduler

    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    for sinfo, state in (("exit 1", State.OPTIONAL), ("echo cpu up", State.OK)):
        for name, text in (("sbatch", "echo slurm 24.05"), ("sinfo", sinfo)):
            (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
            (tmp_path / name).chmod(0o755)
        (finding,) = scheduler()
        assert finding.state is state and "slurm 24.05" in finding.detail


def test_versions_that_do_not_work() -> None:
    from megarl.diagnosis import packages
    from megarl.diagnosis.finding import State

    assert packages.as_numbers("2.11.0+cu130") == (2, 11, 0) and packages.as_numbers("0.16.1rc2") == (0, 16, 12)
    old = packages._required("pytest", "99", "")
    assert old.state is State.MISSING and old.cure == "pip install 'pytest>=99'" and "is installed" in old.detail
    new = packages._required("pytest", "1", "2")
    assert new.state is State.MISSING and new.detail.endswith("pytest>=1,<2 works")
    assert packages._required("pytest", "1", "").state is State.OK


def test_the_doctor_asks_for_what_setup_py_asks_for() -> None:
    from megarl.diagnosis.packages import REQUIRED

    declared = re.findall(
        r'^        "([\w-]+)(?:\[\w+\])?>=([\d.]+)(?:,<([\d.]+))?"', (ROOT / "setup.py").read_text(), re.M
    )
    bounds = {name: (first, beyond) for name, first, beyond in declared}
    for name, wanted in REQUIRED.items():
        assert name == "omegaconf" or bounds[name] == wanted, name


@pytest.mark.slow
def test_the_doctor_sends_data() -> None:
    done = subprocess.run([*COMMAND, "doctor", "--nccl"], cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(
        r"  ok +2 (CPU ranks over gloo|GPUs over NCCL): \d+ MiB in [0-9.]+ ms, [0-9.]+ GB/s per rank", done.stdout
    )
