"""Whose a run folder is, and whether a run can use it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest
from ranks import Ranks
from run_cases import run_here
from selection import quick
from small_disk import small_disk
from small_state import rl_step, state_at
from tiny_run import ROOT, write_run

from megarl.checkpoint.folder import checkpoint_folder, checkpoints, remove_partials, write_state
from megarl.config import load_config
from megarl.config.trainer import TrainerConfig
from megarl.telemetry.lines import LineFile, rewrite
from megarl.trainer.admission.checks import check_run
from megarl.trainer.run_folder import HeldFolder, check_run_folder
from megarl.trainer.run_lock import RunLock, check_free

HOLDS = """
import os, sys, time
from megarl.trainer.run_lock import RunLock
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


def refusal(trainer: TrainerConfig, resume_from: str | None = None, **room: int) -> str:
    with pytest.raises(ValueError) as caught:
        check_run_folder(trainer, resume_from, **room)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_place_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("mine")
    for place in (file, file / "below" / "it"):
        assert refusal(TrainerConfig(default_local_dir=str(place))) == (
            f"the run folder {place} cannot be made: {file} is a file; "
            f"set trainer.default_local_dir, or an evaluation's --out"
        )
    assert f"the disk of the run folder {tmp_path / 'x'} has " in refusal(
        TrainerConfig(default_local_dir=str(tmp_path / "x")), room=2**60
    )
    check_run_folder(TrainerConfig(default_local_dir=str(tmp_path / "x" / "y")), None)
    assert os.listdir(tmp_path) == ["file"]


def test_a_folder_of_somebody_else_s_is_refused() -> None:
    folder = tempfile.mkdtemp()  # pytest's own folders are closed to other users
    os.chmod(folder, 0o555)
    code = """
import os, sys
from megarl.config.trainer import TrainerConfig
from megarl.trainer.run_folder import check_run_folder
if os.geteuid() == 0:  # who may write everywhere
    os.setuid(65534)
for place in sys.argv[1:]:
    try:
        check_run_folder(TrainerConfig(default_local_dir=place), None)
    except ValueError as e:
        print(e)
"""
    command = [sys.executable, "-c", code, folder, f"{folder}/run"]
    try:
        said = subprocess.check_output(command, cwd=ROOT, text=True).splitlines()
    finally:
        os.rmdir(folder)
    cure = "set trainer.default_local_dir, or an evaluation's --out"
    assert said == [
        f"the run folder {folder} cannot be written; {cure}",
        f"the run folder {folder}/run, in {folder}, cannot be written; {cure}",
    ]


def test_a_fresh_run_leaves_another_s_results_alone(tmp_path: Path) -> None:
    fresh = TrainerConfig(default_local_dir=str(tmp_path), resume_mode="disable")
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
    check_run_folder(TrainerConfig(default_local_dir=str(tmp_path)), None)


def test_an_earlier_checkpoint_does_not_overtake_later_ones(tmp_path: Path) -> None:
    folders = {}
    for step in (20, 40):
        folders[step] = checkpoint_folder(str(tmp_path), rl_step(step))
        os.makedirs(folders[step])
        write_state(folders[step], state_at(rl_step(step)))
    earlier = TrainerConfig(default_local_dir=str(tmp_path), resume_mode="resume_path", resume_from_path=folders[20])
    assert refusal(earlier, folders[20]) == (
        f"{tmp_path} holds global_step_40, which is later than global_step_20 of trainer.resume_from_path; set another "
        "trainer.default_local_dir, or move the later ones away"
    )
    check_run_folder(earlier, folders[40])
    check_run_folder(TrainerConfig(default_local_dir=str(tmp_path / "new"), resume_mode="resume_path"), folders[20])


@pytest.mark.parametrize("target", ["a link to a file", "a link to nothing", "another file", "a pipe", "nested"])
def test_a_lock_that_is_none_is_refused_and_nothing_overwritten(tmp_path: Path, target: str) -> None:
    precious, run = tmp_path / "precious", tmp_path / "run"
    run.mkdir()
    text = json.dumps({"pid": 1})
    if target in ("another file", "nested"):
        text = "of somebody" if target == "another file" else "[" * 4096
        (run / "lock").write_text(text)
    elif target == "a pipe":
        os.mkfifo(run / "lock")
    else:
        (run / "lock").symlink_to(precious)
    if target == "a link to a file":
        precious.write_text(text)
    with pytest.raises(ValueError, match=rf"^{run}/lock is (a link; remove|not a run's lock; move) it"):
        RunLock(str(run))
    check_free(str(run))
    if target == "a link to a file":
        assert precious.read_text() == text
    elif target in ("another file", "nested"):
        assert (run / "lock").read_text() == text
    else:
        assert not precious.exists()


def test_a_record_that_is_a_link_is_refused(tmp_path: Path) -> None:
    """The run would write where it leads. Only checkpoints, which are often on another disk, may be elsewhere."""
    run, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    run.mkdir()
    elsewhere.mkdir()
    (run / "checkpoints").symlink_to(elsewhere)
    RunLock(str(run)).release()
    (run / "rollouts").symlink_to(elsewhere)
    with pytest.raises(ValueError, match=rf"^{run}/rollouts is a link, and a run writes into no file elsewhere; "):
        RunLock(str(run))
    (run / "rollouts").unlink()
    (run / "metrics.jsonl").symlink_to(elsewhere / "precious")
    with pytest.raises(ValueError, match=rf"^{run}/metrics.jsonl is a link, and a run writes into no file elsewhere; "):
        RunLock(str(run))
    for opened in (lambda: LineFile(str(run / "metrics.jsonl")), lambda: rewrite(str(run / "x"), b"text")):
        (run / "x.new").unlink(missing_ok=True)
        (run / "x.new").symlink_to(elsewhere / "precious")
        with pytest.raises(OSError, match="symbolic links"):
            opened()
    assert os.listdir(elsewhere) == []


def test_a_new_run_folder_is_the_user_s_alone(tmp_path: Path) -> None:
    """One that is there keeps its rights: a group may share it."""
    run, shared = tmp_path / "project" / "run", tmp_path / "shared"
    shared.mkdir(0o750)
    for folder, rights in ((run, 0o700), (shared, 0o750)):
        RunLock(str(folder)).release()
        assert stat.S_IMODE(folder.stat().st_mode) == rights


def test_checkpoints_on_a_disk_that_is_away_are_not_none(tmp_path: Path) -> None:
    """A run would begin again at step 1 beside them."""
    link = tmp_path / "checkpoints"
    link.symlink_to(tmp_path / "away")
    said = f"{link} is a link to {tmp_path}/away, which is no folder now: bring it back, or set another "
    for look in (checkpoints, remove_partials):
        with pytest.raises(ValueError) as refused:
            look(str(tmp_path))
        assert str(refused.value) == f"{said}trainer.default_local_dir"
    (tmp_path / "away").mkdir()
    assert checkpoints(str(tmp_path)) == []
    link.unlink()
    link.write_text("")
    with pytest.raises(ValueError, match=f"^{link} is no folder: bring it back, or set another "):
        checkpoints(str(tmp_path))


def test_a_run_whose_checkpoints_are_away_is_refused(tmp_path: Path) -> None:
    config = write_run(tmp_path)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoints").symlink_to("/nowhere/checkpoints")
    with pytest.raises(ValueError, match=r"^\S+/run/checkpoints is a link to /nowhere/checkpoints, which is no folder"):
        check_run(load_config(str(config)))


def test_a_folder_that_has_gone_is_known(tmp_path: Path) -> None:
    run = tmp_path / "run"
    said = (
        f"the run folder {run} has gone: it was moved, deleted or unmounted; bring it back, and start again to go on "
        "from its newest checkpoint"
    )

    def begun() -> HeldFolder:
        shutil.rmtree(run, ignore_errors=True)
        run.mkdir()
        (run / "lock").write_text("{}")
        return HeldFolder(str(run))

    held = begun()
    assert held.problem() is None
    run.rename(tmp_path / "elsewhere")
    assert held.problem() == said
    run.mkdir()
    assert held.problem() == said  # another one
    run.rmdir()
    (tmp_path / "elsewhere").rename(run)
    assert held.problem() is None  # the same again
    shutil.rmtree(run)
    run.mkdir()
    (run / "lock").write_text("{}")
    assert held.problem() == said
    held.release()
    held = begun()
    (run / "lock").unlink()
    (run / "lock").write_text("{}")  # a second run's
    assert held.problem() == said
    held.release()


TAKES_AWAY = """
import contextlib, os, shutil, subprocess, zlib
from selection import quick
def score(response, row):
    run, how = {run!r}, {how!r}
    rows = os.path.join(run, "metrics.jsonl")
    with contextlib.suppress(FileNotFoundError):  # the other rank's worker was here first
        if open(rows).read().count("\\n") == 2:
            if how == "moved":
                os.rename(run, run + ".moved")
            if how == "deleted":
                shutil.rmtree(run, ignore_errors=True)
            if how == "unmounted":
                subprocess.run(["umount", "-l", run], stderr=subprocess.DEVNULL)
    return zlib.crc32(response.encode()) / 2**32
"""


@pytest.mark.parametrize("how", quick(["moved", "deleted", "unmounted"], 1))
def test_a_run_ends_whose_folder_is_taken_away(ranks: Ranks, tmp_path: Path, how: str) -> None:
    run = tmp_path / "run"
    (tmp_path / "reward.py").write_text(TAKES_AWAY.format(run=str(run), how=how))
    config = write_run(
        tmp_path,
        reward={"name": f"{tmp_path / 'reward.py'}:score", "workers": 1},
        trainer__total_training_steps=5,
        trainer__save_freq=1,
        trainer__val_before_train=False,
        trainer__test_freq=0,
        trainer__logger=["jsonl", "csv", "tensorboard"],
    )
    with small_disk(run, 16384) if how == "unmounted" else nullcontext():
        (ended, said), (other, _) = ranks.run(2, run_here, str(config))
        assert ended == other and ended.startswith(
            f"RunStopped: step 3 is not recorded: the run folder {run} has gone: "
        )
        assert "Traceback" not in said and said.count("\n") == said.count("megarl: ")
        if how == "unmounted":
            assert os.listdir(run) == []
            subprocess.run(["mount", "-t", "tmpfs", "tmpfs", run], check=True)  # for the one that takes it down
        else:
            assert not run.exists()
        if how == "moved":
            rows = (tmp_path / "run.moved" / "metrics.jsonl").read_text().splitlines()
            assert [json.loads(row)["step"] for row in rows] == [1, 2]
