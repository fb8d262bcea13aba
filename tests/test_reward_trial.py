"""The reward is tried on reference answers before ranks start, in processes as in the run."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from selection import quick
from tiny_run import ROOT, write_run

from megarl.config import load_config
from megarl.trainer.admission.checks import check_run
from megarl.trainer.scoring import trial

REWARDS = """
import time
def right(response, row): return float(response == row["answer"])
def nothing(response, row): return 0.0
def brief(response, row): return -len(response)
def nan(response, row): return float("nan")
def raises(response, row): return {"7": 1.0}[response]
def splits(response, row): return float(response.split()[0] == row["answer"])
def hangs(response, row):
    while True: time.sleep(0.01)
def batches(responses, rows): return [float(a == row["answer"]) for a, row in zip(responses, rows)]
async def waits(response, row): return float(response == row["answer"])
"""
TYPICAL = "reward on 4 reference answers: 1.0 1.0 1.0 1.0; on empty responses: 0.0 0.0 0.0 0.0"


@pytest.fixture
def tried(tmp_path: Path) -> Callable[..., tuple[str, ...]]:
    """What a trial with one of the functions says."""
    config, file = str(write_run(tmp_path)), tmp_path / "own.py"
    file.write_text(REWARDS)

    def tried(name: str, *overrides: str) -> tuple[str, ...]:
        chosen = [f"reward.name={file}:{name}" if name else "reward.timeout=300", *overrides]
        return trial.try_reward(check_run(load_config(config, chosen)))

    return tried


def test_scores_are_shown(tried: Callable[..., tuple[str, ...]], tmp_path: Path) -> None:
    assert tried("right") == (TYPICAL,)
    assert tried("hangs", "reward.trial=0") == ()
    rows = [{"prompt": "1+1=", "answer": None, "id": i} for i in range(80)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert tried("raises") == ()  # there is nothing to try it on


@pytest.mark.slow
def test_every_kind_of_function_is_tried(tried: Callable[..., tuple[str, ...]]) -> None:
    assert tried("") == tried("batches", "reward.batch_size=3") == tried("waits") == (TYPICAL,)


@pytest.mark.parametrize("name", quick(["brief", "nothing"], 0))
def test_low_scores_are_a_remark(tried: Callable[..., tuple[str, ...]], name: str) -> None:
    """The lowest that there are, or no more than those of empty responses."""
    shown, remark = tried(name, "reward.trial=2")
    assert shown.startswith("reward on 2 reference answers: ") and shown.endswith("; on empty responses: 0.0 0.0")
    assert remark.startswith("remark: no reference answer scores more than an empty response; if responses are")


def test_every_data_source_is_tried(tried: Callable[..., tuple[str, ...]], tmp_path: Path) -> None:
    """Of 80 rows, of which one in twenty is of the source that a part cannot score."""
    rows = [{"prompt": "1+1=", "answer": "2", "data_source": "b" if i % 20 == 19 else "a"} for i in range(80)]
    for name in ("train", "val"):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    parts = {"one": ("right", "a"), "other": ("raises", "b")}
    keys = [
        f"reward.parts.{label}={{name: {tmp_path}/own.py:{name}, data_sources: [{source}]}}"
        for label, (name, source) in parts.items()
    ]
    with pytest.raises(ValueError, match=r"^a reference answer cannot be scored: reward.parts.other.name = .*KeyError"):
        tried("", *keys)


def test_a_reward_that_fails_is_refused(tried: Callable[..., tuple[str, ...]], tmp_path: Path) -> None:
    def refusal(*arguments: str) -> str:
        with pytest.raises(ValueError) as error:
            tried(*arguments)
        assert "\n" not in str(error.value)
        return str(error.value)

    said = refusal("raises")
    where, row = (
        f"reward.name = {tmp_path}/own.py:raises raised KeyError: ",
        f"; row {tmp_path}/train.jsonl:1, response ",
    )
    assert said.startswith(f"a reference answer cannot be scored: {where}") and row in said
    assert f'(File "{tmp_path}/own.py", line 7, in raises); change the reward or the row, or leave the trial' in said
    assert "returned nan, which is not finite" in refusal("nan")
    assert "returned nan" in refusal("nan", "reward.on_error=drop")  # none of all could be scored
    assert "took longer than reward.timeout = 0.2 s" in refusal("hangs", "reward.timeout=0.2", "reward.trial=1")


def test_what_only_empty_responses_do_is_a_remark(tried: Callable[..., tuple[str, ...]]) -> None:
    shown, remark = tried("splits", "reward.trial=2")
    assert shown == "reward on 2 reference answers: 1.0 1.0; on empty responses: - -"
    assert remark.startswith("remark: 2 calls of the reward failed; the first: reward.name = ")
    assert "raised IndexError: list index out of range; row " in remark and remark.endswith("response ''")


def test_a_reward_that_hangs_costs_its_seconds(
    tried: Callable[..., tuple[str, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No process stays."""
    monkeypatch.setattr(trial, "SECONDS", 1.0)
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    (remark,) = tried("hangs", "reward.timeout=200")
    assert remark == (
        "remark: the reward gave no score to 4 reference answers within 1 s; in the run a call may take reward.timeout "
        "= 200 s"
    )
    assert {child.pid for child in psutil.Process().children(recursive=True)} <= before


@pytest.mark.slow
def test_the_command_tries_it_before_ranks_start(tmp_path: Path) -> None:
    config = str(write_run(tmp_path, trainer__total_training_steps=1))
    (tmp_path / "own.py").write_text(REWARDS)

    def train(*overrides: str) -> Any:
        command = [sys.executable, "-m", "megarl.cli.main", "train", config, *overrides]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500)

    refused = train(f"reward.name={tmp_path}/own.py:raises")
    assert refused.returncode == 2 and refused.stderr.startswith("megarl: error: a reference answer cannot be scored: ")
    assert not (tmp_path / "run").exists()
    run = train()
    assert run.returncode == 0 and f"megarl: {TYPICAL}\n" in run.stderr
