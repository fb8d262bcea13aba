"""Whose a run folder is, and whether a run can use it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tiny_run import ROOT

from megarl.checkpoint.folder import checkpoint_folder, rl_step, write_state
from megarl.config.trainer import Trainer
from megarl.trainer.resuming.run_folder import check_run_folder
from megarl.trainer.resuming.run_lock import RunLock, check_free

HOLDS = """
import os, sys, time
from megarl.trainer.resuming.run_lock import RunLock
lock = RunLock(sys.argv[1])
if os.fork() == 0:
    time.sleep(60)
print("locked", flush=True)
time.sleep(60)
"""


@contextmanager
def another_run(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that holds the folder, and a forked helper that outlives it."""
    command = [sys.executable, "-c", HOLDS, str(folder)]
    holder = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        assert holder.stdout is not None and holder.stdout.readline() == "locked\n"
        yield holder
    finally:
        os.killpg(holder.pid, signal.SIGKILL)
        holder.wait()


def test_a_second_run_is_refused_and_the_lock_ends_with_its_holder(tmp_path: Path) -> None:
    check_free(str(tmp_path / "run"))
    assert not (tmp_path / "run").exists()
    with another_run(tmp_path) as holder:
        of_holder = (tmp_path / "lock").read_text()
        by = f"pid {holder.pid} on host {socket.gethostname()}"
        said = rf"^{tmp_path} is in use by {by} since 2\d+-\d\d-\d\d \d\d:\d\d: "
        said += r"wait for it, stop it, or set trainer\.default_local_dir$"
        with pytest.raises(ValueError, match=said):
            check_free(str(tmp_path))
        with pytest.raises(ValueError, match=said):
            RunLock(str(tmp_path))
        assert (tmp_path / "lock").read_text() == of_holder
        os.kill(holder.pid, signal.SIGKILL)
        holder.wait()  # its helper is still there
        check_free(str(tmp_path))
        lock = RunLock(str(tmp_path))
        assert json.loads((tmp_path / "lock").read_text())["pid"] == os.getpid()
        with pytest.raises(ValueError, match=f"in use by pid {os.getpid()} on host"):
            check_free(str(tmp_path))
        lock.release()
        check_free(str(tmp_path))


def refusal(trainer: Trainer, resume_from: str | None = None, **room: int) -> str:
    with pytest.raises(ValueError) as caught:
        check_run_folder(trainer, resume_from, **room)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_place_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("mine")
    for place in (file, file / "below" / "it"):
        assert refusal(Trainer(default_local_dir=str(place))) == (
            f"the run folder {place} cannot be made: {file} is a file; set trainer.default_local_dir"
        )
    assert f"the disk of the run folder {tmp_path / 'x'} has " in refusal(
        Trainer(default_local_dir=str(tmp_path / "x")), room=2**60
    )
    check_run_folder(Trainer(default_local_dir=str(tmp_path / "x" / "y")), None)
    assert os.listdir(tmp_path) == ["file"]


def test_a_folder_of_somebody_else_s_is_refused() -> None:
    folder = tempfile.mkdtemp()  # pytest's own folders are closed to other users
    os.chmod(folder, 0o555)
    code = """
import os, sys
from megarl.config.trainer import Trainer
from megarl.trainer.resuming.run_folder import check_run_folder
if os.geteuid() == 0:  # who may write everywhere
    os.setuid(65534)
for place in sys.argv[1:]:
    try:
        check_run_folder(Trainer(default_local_dir=place), None)
    except ValueError as e:
        print(e)
"""
    command = [sys.executable, "-c", code, folder, f"{folder}/run"]
    try:
        said = subprocess.check_output(command, cwd=ROOT, text=True).splitlines()
    finally:
        os.rmdir(folder)
    assert said == [
        f"the run folder {folder} cannot be written; set trainer.default_local_dir",
        f"the run folder {folder}/run, in {folder}, cannot be written; set trainer.default_local_dir",
    ]


def test_a_fresh_run_leaves_another_s_results_alone(tmp_path: Path) -> None:
    fresh = Trainer(default_local_dir=str(tmp_path), resume_mode="disable")
    (tmp_path / "lock").write_text("")
    (tmp_path / "rollouts").mkdir()
    check_run_folder(fresh, None)  # a run that ended before its first step
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    (tmp_path / "rollouts" / "step_000001.jsonl").write_text("{}\n")
    assert refusal(fresh) == (
        f"{tmp_path} holds another run's metrics.jsonl, rollouts, and trainer.resume_mode=disable starts anew; set "
        "trainer.resume_mode=auto to go on with that run, or another trainer.default_local_dir or "
        "trainer.experiment_name"
    )
    check_run_folder(Trainer(default_local_dir=str(tmp_path)), None)


def test_an_earlier_checkpoint_does_not_overtake_later_ones(tmp_path: Path) -> None:
    folders = {}
    for step in (20, 40):
        folders[step] = checkpoint_folder(str(tmp_path), rl_step(step))
        os.makedirs(folders[step])
        write_state(folders[step], {"step": step})
    earlier = Trainer(default_local_dir=str(tmp_path), resume_mode="resume_path", resume_from_path=folders[20])
    assert refusal(earlier, folders[20]) == (
        f"{tmp_path} holds global_step_40, which is later than global_step_20 of trainer.resume_from_path; set another "
        "trainer.default_local_dir, or move the later ones away"
    )
    check_run_folder(earlier, folders[40])
    check_run_folder(Trainer(default_local_dir=str(tmp_path / "new"), resume_mode="resume_path"), folders[20])
