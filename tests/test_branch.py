"""`megarl branch`: a new run from a checkpoint of another."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from ranks import Ranks
from tiny_run import TrainedRun, train_in, write_run

from megarl.checkpoint.folder import check_whole
from megarl.cli import branch
from megarl.cli.main import main
from megarl.cli.runs import read_run
from megarl.trainer.starts import past_starts

LR = "actor_rollout_ref.actor.optim.lr=0.5"


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory, ranks: Ranks) -> TrainedRun:
    """A run of three steps, each saved."""
    folder = tmp_path_factory.mktemp("first")
    config = write_run(folder, trainer__save_freq=1, trainer__total_training_steps=3, trainer__logger=["jsonl"])
    return TrainedRun(config=config, folder=folder, out=train_in(ranks, 1, config))


def refusal(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["branch", *words]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and err.startswith("megarl: error: ")
    return err.removeprefix("megarl: error: ").strip()


def test_a_branch_goes_on_whatever_becomes_of_the_first_run(
    first: TrainedRun, ranks: Ranks, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, new = tmp_path / "first", tmp_path / "new"
    shutil.copytree(first.folder / "run", run)
    assert main(["branch", str(run), "--at", "2", f"trainer.default_local_dir={new}", LR]) == 0
    assert capsys.readouterr().out.splitlines()[1] == f"megarl train --nproc 1 {new}/config.yaml"
    linked = [path.stat().st_nlink for path in (new / "checkpoints" / "global_step_2").iterdir()]
    assert set(linked) == {2}
    rows = [json.loads(line) for line in (new / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 1, 2] and rows == first.rows[:3]
    shutil.rmtree(run)
    train_in(ranks, 1, new / "config.yaml")
    rows = [json.loads(line) for line in (new / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 1, 2, 3] and rows[:3] == first.rows[:3]
    (start,) = past_starts(str(new))
    assert start.checkpoint == str(new / "checkpoints" / "global_step_2")
    assert "lr: 0.5" in (new / "starts" / "0001" / "config.yaml").read_text()
    parent = str(run / "checkpoints" / "global_step_2")
    recorded = json.loads((new / "starts" / "0001" / "environment.json").read_text())["parent"]
    assert recorded == {"checkpoint": parent, "changed": ["trainer.default_local_dir", LR.partition("=")[0]]}
    assert read_run(str(new)).parent == parent


def test_a_branch_on_another_disk_is_a_copy(
    first: TrainedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """/dev/shm is one; the newest checkpoint without --at, and one by its name."""
    if not Path("/dev/shm").is_dir() or Path("/dev/shm").stat().st_dev == first.folder.stat().st_dev:
        pytest.skip("/dev/shm is no other disk")
    new = Path("/dev/shm") / f"megarl-{tmp_path.name}"
    try:
        assert main(["branch", str(first.folder / "run"), f"trainer.default_local_dir={new}"]) == 0
        files = list((new / "checkpoints" / "global_step_3").iterdir())
        source = first.checkpoint(3)
        assert files and all(path.read_bytes() == (source / path.name).read_bytes() for path in files)
        assert {path.stat().st_nlink for path in files} == {1}
    finally:
        shutil.rmtree(new, ignore_errors=True)


def test_refusals(first: TrainedRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One line each, and nothing is made."""
    run, new = str(first.folder / "run"), tmp_path / "new"
    place = f"trainer.default_local_dir={new}"
    said = refusal(capsys, run, "--at", "7", place)
    assert said == f"{run} has no checkpoint '7'; whole ones there: global_step_1, global_step_2, global_step_3"
    assert refusal(capsys, run, "--at", "", place).startswith(f"{run} has no checkpoint ''; whole ones")
    for word in ("trainer.resume_mode=disable", f"trainer.resume_from_path={first.checkpoint(1)}"):
        assert refusal(capsys, run, place, word).startswith("the new run goes on from its own checkpoint: leave")
    assert refusal(capsys, str(tmp_path / "none")).startswith("no run folder at")
    assert refusal(capsys, run, "--at", "2").startswith(f"the new run needs a folder other than {run}: add")
    assert "another seed (data.seed 1 -> 3)" in (said := refusal(capsys, run, "--at", "2", place, "data.seed=3"))
    assert said.endswith("set trainer.resume_allow=[seed]")
    assert "unknown key" in refusal(capsys, run, place, "trainer.total_stepz=3")
    damaged = tmp_path / "damaged"
    shutil.copytree(run, damaged)
    (damaged / "checkpoints" / "global_step_2" / "manifest.json").unlink()
    assert refusal(capsys, str(damaged), "--at", "2", place).startswith("no run can begin from")
    assert not new.exists()
    new.mkdir()
    (new / "file").write_text("")
    assert refusal(capsys, run, "--at", "2", place).startswith(f"'{new}' holds something already")


def test_a_checkpoint_that_goes_meanwhile_leaves_nothing(
    first: TrainedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    shutil.copytree(first.folder / "run", run)
    check = branch._check_settings

    def prune(*arguments: object) -> None:
        check(*arguments)  # type: ignore[arg-type]
        (run / "checkpoints" / "global_step_2").rename(run / "checkpoints" / ".global_step_2.partial")

    monkeypatch.setattr(branch, "_check_settings", prune)
    said = refusal(capsys, str(run), "--at", "2", f"trainer.default_local_dir={tmp_path / 'deep' / 'new'}")
    assert said.startswith(f"{tmp_path}/deep/new cannot be made from {run}/checkpoints/global_step_2: ")
    assert not (tmp_path / "deep" / "new").exists()


def test_a_branch_deletes_only_what_it_made(
    first: TrainedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What others put there meanwhile stays: a file, and the whole branch of a second command."""
    run, new = str(first.folder / "run"), tmp_path / "new"
    words = [run, "--at", "2", f"trainer.default_local_dir={new}"]
    rows, fill = branch._rows_until, branch._fill

    def beside(*arguments: Any) -> bytes:
        (new / "config.yaml").write_text("another's")
        return rows(*arguments)

    monkeypatch.setattr(branch, "_rows_until", beside)
    assert "File exists" in refusal(capsys, *words)
    assert [path.name for path in new.iterdir()] == ["config.yaml"] and (new / "config.yaml").read_text() == "another's"
    (new / "config.yaml").unlink()

    def after_another(*arguments: Any) -> None:
        monkeypatch.undo()
        fill(*arguments)
        fill(*arguments)

    monkeypatch.setattr(branch, "_fill", after_another)
    monkeypatch.setattr(branch, "_rows_until", rows)
    assert "File exists" in refusal(capsys, *words)
    assert {path.name for path in new.iterdir()} == {"checkpoints", "config.yaml", "metrics.jsonl", "parent.json"}
    check_whole(str(new / "checkpoints" / "global_step_2"))


def test_a_branch_with_nothing_to_do_says_so(
    first: TrainedRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [f"trainer.default_local_dir={tmp_path / 'new'}", "trainer.total_training_steps=2"]
    assert main(["branch", str(first.folder / "run"), *words]) == 0
    assert "nothing to do: " in capsys.readouterr().err
