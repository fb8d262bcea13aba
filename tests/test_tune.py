"""`megarl tune`: trials are runs; they are pruned, survive kills, and share a folder."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from tiny_run import ROOT, write_run

from megarl.cli.main import main
from megarl.config import load_config

optuna = pytest.importorskip("optuna")

FIXED = "import zlib\ndef score(response, row):\n    return zlib.crc32(response.encode()) / 2**32\n"


def write_sweep(folder: Path, /, **changes: Any) -> Path:
    """Write a run of one rank and a search over it; returns the search's file."""
    reward = folder / "reward.py"
    reward.write_text(FIXED)
    run = write_run(
        folder,
        reward__name=f"{reward}:score",
        trainer__val_before_train=False,
        trainer__test_freq=0,
        trainer__logger=["console", "jsonl"],
        trainer__total_training_steps=2,
    )
    sweep: dict[str, Any] = {
        "config": str(run),
        "folder": str(folder / "sweep"),
        "metric": "reward/mean",
        "trials": 2,
        "keys": {
            "actor_rollout_ref.actor.optim.lr": {"low": 1e-4, "high": 1e-2, "log": True},
            "actor_rollout_ref.rollout.n": [2, 4],
        },
        "sampler": {"name": "RandomSampler", "args": {"seed": 1}},
    }
    file = folder / "sweep.yaml"
    file.write_text(yaml.safe_dump(sweep | changes))
    return file


def study_of(folder: Path) -> Any:
    """The search's study, as any program opens it."""
    backend = optuna.storages.journal.JournalFileBackend(str(folder / "sweep" / "journal.log"))
    return optuna.load_study(study_name=None, storage=optuna.storages.JournalStorage(backend))


def told(sweep: Path, value: float | None) -> None:
    """End the search's next trial with a value, or as failed."""
    from megarl.tuning.study import Trials
    from megarl.tuning.sweep import read_sweep

    trials = Trials(read_sweep(str(sweep)))
    with trials.next(9) as trial:
        assert trial is not None
        trials.study.tell(trial, value, state=optuna.trial.TrialState.FAIL if value is None else None)


def start(sweep: Path, *words: str) -> subprocess.Popen[str]:
    """Start the command in a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "megarl.cli.main", "tune", str(sweep), *words],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def wait_for(what: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    while not what():
        assert process.poll() is None, process.stdout.read() if process.stdout else ""
        time.sleep(0.05)


def steps_of(run: Path) -> list[int]:
    file = run / "metrics.jsonl"
    return [json.loads(line)["step"] for line in file.read_text().splitlines()] if file.exists() else []


REFUSALS: list[tuple[dict[str, Any], list[str], str]] = [
    ({"keys": {"data.sed": [1]}}, [], "unknown key 'data.sed'; did you mean 'data.seed'?"),
    ({"keys": {"data.seed": {"low": 2, "high": 1}}}, [], "data.seed has no value: give a list of values"),
    ({"keys": {"data.seed": []}}, [], "data.seed has no value: give a list of values"),
    ({"keys": {"data.seed": {"low": -1, "high": 1}}}, [], "data.seed: input should be greater than or equal to 0"),
    ({"keys": {"data.seed": {"low": 0, "high": 9, "log": True}}}, [], "keys.data.seed: `low >= 1` must hold"),
    ({"keys": {}}, [], "keys: dictionary should have at least 1 item"),
    ({"sampler": {"name": "Sampler"}}, [], "sampler.name = Sampler is none of BruteForceSampler, "),
    ({"pruner": {"name": "NopPruner", "args": {"x": 1}}}, [], "pruner.args of NopPruner: "),
    ({"metrik": "x"}, [], "metrik: extra inputs are not permitted"),
    ({"config": "nowhere.yaml"}, [], "no config file at 'nowhere.yaml'"),
    ({"folder": "/dev/null/x"}, [], "folder /dev/null/x cannot be made: Not a directory; set another one"),
    ({}, ["--trials", "0"], "--trials 0 must be 1 or more"),
    ({}, ["trainer.nnodes=2"], "a trial is a run on one machine; set trainer.nnodes=1"),
    ({}, ["trainer.resume_mode=disable"], "the search sets trainer.resume_mode for each trial: leave it out"),
    ({"keys": {"trainer.default_local_dir": ["a"]}}, [], "the search sets trainer.default_local_dir for each trial"),
    ({}, ["trainer.logger=[console]"], "add jsonl to trainer.logger"),
]


@pytest.mark.parametrize(("changes", "words", "message"), REFUSALS, ids=[message for *_, message in REFUSALS])
def test_a_search_that_cannot_work_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, Any], words: list[str], message: str
) -> None:
    assert main(["tune", str(write_sweep(tmp_path, **changes)), *words]) == 2
    out, err = capsys.readouterr()
    assert message in err and err.count("\n") == 1 and out == ""


def test_ranges_of_whole_numbers_are_whole(tmp_path: Path) -> None:
    from megarl.tuning.study import Trials
    from megarl.tuning.sweep import overrides, read_sweep

    keys = {"a": {"low": 1, "high": 9, "step": 4}, "b": {"low": 1.0, "high": 2}, "c": ["x: y", None, True, 1e-6]}
    with Trials(read_sweep(str(write_sweep(tmp_path, keys=keys)))).next(1) as trial:
        assert trial is not None
        assert trial.params["a"] in (1, 5, 9) and type(trial.params["a"]) is int
        assert type(trial.params["b"]) is float
    place = {"trainer.default_local_dir": "a: b 🙂"}
    assert load_config(None, overrides(place)).trainer.default_local_dir == "a: b 🙂"
    assert overrides({"c": "x: y", "d": None, "e": True, "f": 1e-6}) == ['c="x: y"', "d=null", "e=true", "f=1e-06"]


def test_a_lost_trial_is_tried_again_once(tmp_path: Path) -> None:
    """With its values and its folder; and it does not count twice."""
    from megarl.tuning.study import Trials
    from megarl.tuning.sweep import read_sweep

    sweep = read_sweep(str(write_sweep(tmp_path)))
    one, other = Trials(sweep), Trials(sweep)
    with one.next(2) as lost, other.next(2) as second, one.next(2) as none:
        assert lost is not None and second is not None and none is None
        values, folder = lost.params, one.folder(lost)
        other.study.tell(second, 0.5)
    with other.next(2) as again:
        assert again is not None and again.number == 2
        assert again.params == values and other.folder(again) == folder
        one.study.tell(again, 0.7)
    with one.next(2) as none:
        assert none is None
    assert [trial.state.name for trial in one.study.trials] == ["FAIL", "COMPLETE", "COMPLETE"]
    assert [trial.number for trial in one.finished()] == [2, 1]


def test_a_folder_holds_one_search(tmp_path: Path) -> None:
    from megarl.tuning.study import Trials
    from megarl.tuning.sweep import read_sweep

    Trials(read_sweep(str(write_sweep(tmp_path))))
    for change in ({"metric": "val/accuracy"}, {"mode": "min"}):
        with pytest.raises(ValueError, match="holds a search with another metric or mode; set another folder"):
            Trials(read_sweep(str(write_sweep(tmp_path, **change))))
    told(write_sweep(tmp_path, keys={"data.seed": [1, 2]}), 0.5)
    for values in ([1, 3], {"low": 1, "high": 2}):
        with pytest.raises(ValueError, match="other choices, or another kind of range, for data"):
            Trials(read_sweep(str(write_sweep(tmp_path, keys={"data.seed": values}))))


def test_a_trial_s_values_stand_under_its_own_keys(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever keys the sweep has now, in whatever order; values are no markup."""
    keys = {"trainer.experiment_name": ["[/]"], "data.seed": [7], "data.train_batch_size": [8]}
    told(write_sweep(tmp_path, keys=keys), 0.5)
    now = {"actor_rollout_ref.rollout.n": [2], "data.seed": [7], "trainer.experiment_name": ["[/]"]}
    assert main(["tune", str(write_sweep(tmp_path, keys=now)), "--trials", "1"]) == 0
    rows = [
        re.split("[│┃]", line) for line in capsys.readouterr().out.splitlines() if "[/]" in line or "data.seed" in line
    ]
    heads, values = ([cell.strip() for cell in row] for row in rows)
    assert dict(zip(heads, values, strict=True)) == {
        **{"": "", "trial": "0", "state": "complete", "reward/mean": "0.5", "actor_rollout_ref.rollout.n": ""},
        **{"data.seed": "7", "trainer.experiment_name": "[/]", "data.train_batch_size": "8"},
    }


def test_a_search_without_a_trial_that_ended_well_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sweep = write_sweep(tmp_path)
    told(sweep, None)
    assert main(["tune", str(sweep), "--trials", "1"]) == 1
    out, err = capsys.readouterr()
    assert (out, err) == ("", f"megarl: all trials have failed: {tmp_path}/sweep/trial_*.log say why\n")


def test_half_a_line_of_the_study_is_left_out(tmp_path: Path) -> None:
    sweep, journal = write_sweep(tmp_path), tmp_path / "sweep" / "journal.log"
    told(sweep, 0.5)
    whole = journal.read_bytes()
    journal.write_bytes(whole + b'{"op_code":4,"wor')
    told(sweep, 0.7)
    assert [trial.value for trial in study_of(tmp_path).trials] == [0.5, 0.7]
    assert journal.read_bytes().startswith(whole) and b'"wor{' not in journal.read_bytes()


def test_a_study_that_cannot_be_read_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sweep, journal = write_sweep(tmp_path), tmp_path / "sweep" / "journal.log"
    told(sweep, 0.5)
    lines = journal.read_bytes().splitlines(keepends=True)
    for damaged in (b"nonsense\n", b"\xff\n", b"[1]\n"):
        journal.write_bytes(b"".join([*lines[:3], damaged, *lines[3:]]))
        assert main(["tune", str(sweep)]) == 2
        error = capsys.readouterr().err
        assert f"{journal} is damaged (" in error and "set another folder" in error and error.count("\n") == 1
    journal.unlink()
    journal.mkdir()
    assert main(["tune", str(sweep)]) == 2
    assert f"the search in {tmp_path}/sweep stopped: [Errno 21] Is a directory: " in capsys.readouterr().err


def test_a_full_disk_ends_the_search_in_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The limit of a file's size stands for it, at the study and at the log of a run."""
    sweep = write_sweep(tmp_path)
    told(sweep, 0.5)
    before, ignored = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, ((tmp_path / "sweep" / "journal.log").stat().st_size + 9, before[1]))
    try:
        assert main(["tune", str(sweep)]) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    error = capsys.readouterr().err
    assert f"the search in {tmp_path}/sweep stopped: [Errno 27] File too large" in error and error.count("\n") == 1


@pytest.mark.slow
def test_trials_are_runs_and_the_best_one_is_shown(tmp_path: Path) -> None:
    done = start(write_sweep(tmp_path), "data.train_batch_size=8")
    said, _ = done.communicate(timeout=500)
    assert done.returncode == 0, said
    study = study_of(tmp_path)
    assert [trial.state.name for trial in study.trials] == ["COMPLETE", "COMPLETE"]
    for trial in study.trials:
        run = tmp_path / "sweep" / f"trial_{trial.number:04d}"
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        assert trial.value == rows[-1]["reward/mean"]
        assert trial.intermediate_values == {row["step"]: row["reward/mean"] for row in rows}
        config = yaml.safe_load((run / "config.yaml").read_text())
        assert config["actor_rollout_ref"]["rollout"]["n"] == trial.params["actor_rollout_ref.rollout.n"]
        assert config["data"]["train_batch_size"] == 8
    best = yaml.safe_load((tmp_path / "sweep" / "best.yaml").read_text())
    lr = "actor_rollout_ref.actor.optim.lr"
    assert best["actor_rollout_ref"]["actor"]["optim"]["lr"] == study.best_trial.params[lr]
    assert re.search(rf"best: trial {study.best_trial.number}, .*megarl train .*/best.yaml", said)


@pytest.mark.slow
def test_a_killed_search_goes_on_from_the_checkpoint(tmp_path: Path) -> None:
    sweep = write_sweep(tmp_path, trials=1)
    words = ("trainer.total_training_steps=400", "trainer.save_freq=1", "trainer.max_ckpt_to_keep=2")
    run = tmp_path / "sweep" / "trial_0000"
    first = start(sweep, *words)
    wait_for(lambda: (run / "checkpoints" / "global_step_2").exists(), first)
    first.kill()
    first.wait()
    seen = steps_of(run)
    second = start(sweep, "trainer.total_training_steps=400", f"trainer.total_training_steps={seen[-1] + 5}")
    said, _ = second.communicate(timeout=500)
    assert second.returncode == 0, said
    assert "resuming from" in (tmp_path / "sweep" / "trial_0000.log").read_text()
    assert steps_of(run) == [*range(1, seen[-1] + 6)]
    lost, again = study_of(tmp_path).trials
    assert (lost.state.name, again.state.name) == ("FAIL", "COMPLETE") and again.params == lost.params


@pytest.mark.slow
def test_a_trial_is_pruned_while_it_trains(tmp_path: Path) -> None:
    """By a pruner that admits no reward: the run ends at SIGTERM long before its last step."""
    sweep = write_sweep(
        tmp_path, trials=1, pruner={"name": "ThresholdPruner", "args": {"lower": 2.0, "n_warmup_steps": 3}}
    )
    done = start(sweep, "trainer.total_training_steps=100000", "trainer.save_freq=0")
    said, _ = done.communicate(timeout=500)
    assert done.returncode == 0 and "trial 0 is pruned: reward/mean" in said, said
    (trial,) = study_of(tmp_path).trials
    assert trial.state.name == "PRUNED" and max(trial.intermediate_values) >= 3
    assert "SIGTERM" in (tmp_path / "sweep" / "trial_0000.log").read_text()


@pytest.mark.slow
def test_a_signal_stops_the_run_and_the_search_goes_on(tmp_path: Path) -> None:
    sweep = write_sweep(tmp_path, trials=1, folder=str(tmp_path / "a: b"))
    run = tmp_path / "a: b" / "trial_0000"
    first = start(sweep, "trainer.total_training_steps=100000", "trainer.save_freq=-1")
    wait_for(lambda: bool(steps_of(run)), first)
    first.send_signal(signal.SIGINT)
    said, _ = first.communicate(timeout=500)
    assert first.returncode == 128 + signal.SIGINT and "SIGINT: stopped; the same command goes on" in said, said
    (saved,) = (run / "checkpoints").glob("global_step_*")
    step = int(saved.name.rpartition("_")[2])
    second = start(sweep, f"trainer.total_training_steps={step + 1}", "trainer.save_freq=-1")
    said, _ = second.communicate(timeout=500)
    assert second.returncode == 0, said
    assert steps_of(run) == [*range(1, step + 2)]


@pytest.mark.slow
def test_a_search_whose_runs_all_fail_ends(tmp_path: Path) -> None:
    done = start(write_sweep(tmp_path, trials=20), "actor_rollout_ref.actor.ppo_mini_batch_size=7")
    said, _ = done.communicate(timeout=500)
    assert done.returncode == 1
    assert "3 runs in a row have failed, the last one: data.train_batch_size = 16 is not a multiple of" in said
    assert [trial.state.name for trial in study_of(tmp_path).trials] == ["FAIL"] * 3


@pytest.mark.slow
def test_two_workers_share_the_trials(tmp_path: Path) -> None:
    sweep = write_sweep(tmp_path, trials=4, sampler={"name": "RandomSampler"})
    workers = [start(sweep), start(sweep)]
    for worker in workers:
        said, _ = worker.communicate(timeout=500)
        assert worker.returncode == 0, said
    trials = study_of(tmp_path).trials
    assert [trial.state.name for trial in trials] == ["COMPLETE"] * 4
