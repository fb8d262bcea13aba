"""What a machine has for the processes of a job, and what a run does that needs more."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest
from tiny_run import write_run

from megarl import host
from megarl.cli.main import main
from megarl.trainer import memory


@pytest.mark.parametrize("name", ["memory.max", "memory.limit_in_bytes"])
def test_limits_of_control_groups_above_count(tmp_path: Path, name: str) -> None:
    job = tmp_path / "slurm" / "job_7"
    job.mkdir(parents=True)
    for folder, limit in ((tmp_path / "slurm", "3000\n"), (job, "max\n")):
        (folder / name).write_text(limit)
    assert list(host._limits_above(str(tmp_path), "/slurm/job_7", name)) == [3000]
    assert 0 < host.host_memory() <= psutil.virtual_memory().total


def test_cpu_ranks_that_hold_more_than_the_machine_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = str(write_run(tmp_path))
    monkeypatch.setattr(memory, "host_memory", lambda: 2**16)
    assert main(["train", run]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("megarl: error: ")
    assert "GiB that a rank of pipeline stage 1 has; take a smaller model, or fewer ranks on a machine" in line
