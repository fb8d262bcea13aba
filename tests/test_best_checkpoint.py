"""The checkpoint whose validation was best: it is saved, it stays, and the marker names it, whatever happens."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from kill_and_resume import tensors_of
from ranks import Ranks
from run_cases import run_here
from selection import quick
from tiny_run import FINGERPRINT, metrics_of, numbers_of, write_run

from megarl.checkpoint.folder import whole_checkpoints
from megarl.config import load_config
from megarl.trainer.admission.checks import check_run
from megarl.trainer.resuming.best import best_checkpoint
from megarl.trainer.subject import find_subject

STEPS = 5
RUN: dict[str, Any] = {
    "trainer__save_freq": 2,
    "trainer__test_freq": 1,
    "trainer__total_training_steps": STEPS,
    "trainer__best_metric": "val/reward",
    "trainer__logger": ["console", "jsonl"],
}


def write(folder: Path, **more: Any) -> Path:
    """A configuration; with a reward of its own, unless `more` names another run's."""
    (folder / "reward.py").write_text(FINGERPRINT)
    return write_run(folder, **{"reward__name": f"{folder / 'reward.py'}:score", **RUN, **more})


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "run" / "checkpoints").iterdir() if path.is_dir())


def marker(folder: Path) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((folder / "run" / "checkpoints" / "best.json").read_text())
    return values


def values_of(folder: Path) -> dict[int, float]:
    """val/reward by step, without that before the first."""
    return {row["step"]: row["val/reward"] for row in metrics_of(folder) if row["step"] > 0}


def records_of_best(values: dict[int, float], *, low: bool = False) -> list[int]:
    """Steps that were the best so far."""
    found: list[int] = []
    for step, value in values.items():
        if not found or (value < values[found[-1]] if low else value > values[found[-1]]):
            found.append(step)
    return found


@pytest.fixture(scope="module", params=quick(["max", "min"]))
def first_run(request: pytest.FixtureRequest, ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five steps on two ranks, each validated, every second one saved, and nothing deleted."""
    folder = tmp_path_factory.mktemp("best")
    ended, said = ranks.run(2, run_here, str(write(folder, trainer__best_mode=request.param)))[0]
    assert ended == "", said
    return folder


@pytest.fixture
def folder(first_run: Path, tmp_path: Path) -> Path:
    """A copy of it that may be changed."""
    shutil.copytree(first_run, tmp_path, dirs_exist_ok=True)
    return tmp_path


def mode(folder: Path) -> str:
    return str(marker(folder)["mode"])


def go_on(ranks: Ranks, folder: Path, first_run: Path, *overrides: str) -> None:
    """The run of the folder, further: with the first run's reward, or it would be another run."""
    write(folder, reward__name=f"{first_run / 'reward.py'}:score", trainer__best_mode=mode(first_run))
    ended, said = ranks.run(2, run_here, str(folder / "run.yaml"), list(overrides))[0]
    assert ended == "", said


def test_each_best_step_is_saved_and_named(first_run: Path) -> None:
    values, low = values_of(first_run), mode(first_run) == "min"
    best = records_of_best(values, low=low)
    assert names(first_run) == [f"global_step_{step}" for step in sorted({2, 4, STEPS, *best})]
    extreme = min(values.values()) if low else max(values.values())
    said = marker(first_run)
    assert said["step"] == best[-1] and said["value"] == values[best[-1]] == extreme
    assert said["checkpoint"] == f"global_step_{best[-1]}" and said["metric"] == "val/reward"
    assert best_checkpoint(str(first_run / "run")).endswith(f"/global_step_{best[-1]}")
    assert find_subject(str(first_run / "run"), best=True).name == f"global_step_{best[-1]}"
    assert find_subject(str(first_run / "run")).name == f"global_step_{STEPS}"


def test_the_best_stays_beside_the_newest(ranks: Ranks, first_run: Path, tmp_path: Path) -> None:
    """Its metrics and weights are those of the run that kept everything."""
    like = mode(first_run)
    config = write(tmp_path, trainer__best_mode=like, trainer__max_ckpt_to_keep=1)
    assert ranks.run(2, run_here, str(config))[0][0] == ""
    best = marker(first_run)["checkpoint"]
    assert names(tmp_path) == sorted({best, f"global_step_{STEPS}"})
    assert marker(tmp_path) == marker(first_run) and numbers_of(tmp_path) == numbers_of(first_run)
    ours, theirs = (tensors_of(str(f / "run" / "checkpoints" / best)) for f in (tmp_path, first_run))
    assert all((ours[name] == theirs[name]).all() for name in theirs)


@pytest.mark.slow
@pytest.mark.parametrize("left", ["nothing", "an older one", "half of one", "one of a later step"])
def test_a_marker_that_a_death_left_is_mended(ranks: Ranks, first_run: Path, folder: Path, left: str) -> None:
    """The job died after any checkpoint, before, in or after its marker; it goes on and ends as if it had not."""
    like, values = mode(folder), values_of(folder)
    checkpoints = folder / "run" / "checkpoints"
    for name in names(folder):
        if int(name.rpartition("_")[2]) > 2:
            shutil.rmtree(checkpoints / name)
    if left == "nothing":
        (checkpoints / "best.json").unlink()
    elif left == "an older one":
        (checkpoints / "best.json").write_text(json.dumps({**marker(folder), "checkpoint": "global_step_1"}))
    elif left == "half of one":
        (checkpoints / "best.json.partial").write_text('{"checkpoint": "glo')
    until = {step: value for step, value in values.items() if step <= 2}
    go_on(ranks, folder, first_run, "trainer.total_training_steps=2")  # nothing is left to do
    go_on(ranks, folder, first_run, "trainer.total_training_steps=3", "trainer.save_freq=-1", "trainer.test_freq=-1")
    until[3] = values[3]
    assert marker(folder)["step"] == records_of_best(until, low=like == "min")[-1]
    go_on(ranks, folder, first_run)
    assert marker(folder) == marker(first_run) and values_of(folder) == values
    assert not (checkpoints / "best.json.partial").exists()


@pytest.mark.slow
def test_a_best_checkpoint_that_is_damaged_is_best_no_more(ranks: Ranks, first_run: Path, folder: Path) -> None:
    """The next best that is there is named; and another metric is read out of what the checkpoints record."""
    like, values = mode(folder), values_of(folder)
    best = marker(folder)["step"]
    (folder / "run" / "checkpoints" / f"global_step_{best}" / "common.pt").write_bytes(b"")
    more = ["trainer.total_training_steps=6", "trainer.test_freq=100", "trainer.save_freq=-1"]
    if best == STEPS:
        more[0] = f"trainer.total_training_steps={STEPS}"
    go_on(ranks, folder, first_run, *more)
    there = {step: value for step, value in values.items() if f"global_step_{step}" in names(folder)}
    if best != STEPS:
        del there[best]
        there[6] = values_of(folder)[6]
    assert marker(folder)["step"] == (min if like == "min" else max)(there, key=lambda step: there[step])
    go_on(ranks, folder, first_run, "trainer.total_training_steps=7", "trainer.best_metric=val/failed")
    earliest = whole_checkpoints(str(folder / "run"))[-1]
    assert best_checkpoint(str(folder / "run")) == earliest and marker(folder)["value"] == 0.0


@pytest.mark.slow
def test_a_rollback_keeps_the_best(ranks: Ranks, tmp_path: Path) -> None:
    """The second step's loss is no number: its validation counts for nothing, and the run goes on from the first."""
    config = write(tmp_path, trainer__on_nonfinite="rollback", trainer__save_freq=1, trainer__max_ckpt_to_keep=1)
    ended, said = ranks.run(2, run_here, str(config), [], "nan_in_the_second_step")[0]
    assert ended == "" and "rolled back to" in said, said
    values = values_of(tmp_path)
    assert sorted(values) == list(range(1, STEPS + 1))
    best = records_of_best(values)[-1]
    assert marker(tmp_path)["step"] == best and marker(tmp_path)["value"] == values[best]
    assert names(tmp_path) == sorted({f"global_step_{best}", f"global_step_{STEPS}"})


def test_a_low_loss_is_best_where_answers_are_learnt(ranks: Ranks, tmp_path: Path) -> None:
    """Of another loop and another flow; what it scored before the first step is no checkpoint's."""
    config = write(tmp_path, trainer__flow="sft", trainer__best_metric="val/loss", trainer__best_mode="min")
    ended, said = ranks.run(2, run_here, str(config), ["trainer.max_ckpt_to_keep=1"])[0]
    assert ended == "", said
    losses = {row["train/step"]: row["val/loss"] for row in metrics_of(tmp_path) if row["train/step"]}
    best = min(losses, key=lambda step: losses[step])
    assert marker(tmp_path) == {
        "checkpoint": f"train_step_{best:g}",
        "step": best,
        "loop": "train",
        "metric": "val/loss",
        "mode": "min",
        "value": losses[best],
    }


def test_a_metric_that_the_validation_lacks_is_refused(ranks: Ranks, tmp_path: Path) -> None:
    """Before the first step; or, if the first validation comes later, after the steps before it are saved."""
    wrong = write(tmp_path, trainer__best_metric="val/acuracy")
    ended, _ = ranks.run(2, run_here, str(wrong))[0]
    assert re.search(r"^RunRefused: trainer\.best_metric = val/acuracy is no metric of the validation, which", ended)
    assert "val/accuracy" in ended and "\n" not in ended
    ended, _ = ranks.run(2, run_here, str(wrong), ["trainer.val_before_train=false", "trainer.test_freq=3"])[0]
    assert re.search(r"^RunStopped: trainer\.best_metric = val/acuracy .*/global_step_3 holds the steps so far$", ended)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["trainer.save_freq=0"], r"keeps a checkpoint, and trainer\.save_freq=0 saves none; set it to -1 or more"),
        (["trainer.test_freq=0"], r"is measured by validations, and there are none; set trainer\.test_freq$"),
        (["data.val_files=[]", "trainer.test_freq=-1"], r"and there are none; set data\.val_files$"),
        (["trainer.best_mode=most"], r"trainer\.best_mode: input should be 'max' or 'min'"),
    ],
)
def test_a_best_that_cannot_be_is_refused(tmp_path: Path, overrides: list[str], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        check_run(load_config(str(write(tmp_path)), overrides))


def test_a_marker_without_its_checkpoint_is_said(folder: Path) -> None:
    shutil.rmtree(best_checkpoint(str(folder / "run")))
    with pytest.raises(ValueError, match=r"best\.json' names global_step_\d, which is not there$"):
        find_subject(str(folder / "run"), best=True)
    os.unlink(folder / "run" / "checkpoints" / "best.json")
    with pytest.raises(ValueError, match=r"names no best checkpoint: it has no checkpoints/best\.json$"):
        best_checkpoint(str(folder / "run"))
