"""The examples: their few lines train as they are, and the commands of their READMEs run."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from ranks import Ranks
from selection import quick
from tiny_run import ROOT, train_in

EXAMPLES = ROOT / "examples"
GAINS = {"own_reward": 0.3, "own_flow": 0.3, "agent_with_tools": 0.1, "distillation": 0.3, "tune": 0.1}
"""By how much held-out accuracy is higher in the end; half of the least that was seen with three seeds."""


def _commands(name: str) -> list[str]:
    text = (EXAMPLES / name / "README.md").read_text()
    block = "\n".join(line[4:] for line in text.splitlines() if line.startswith("    "))
    return [
        " ".join(shlex.quote(word) for word in shlex.split(line)) for line in block.replace("\\\n", " ").splitlines()
    ]


def _folder(tmp_path: Path) -> Path:
    for name in ("examples", "configs", "tools"):
        (tmp_path / name).symlink_to(ROOT / name)
    return tmp_path


def _run(command: str, folder: Path) -> str:
    words = shlex.split(command)
    own = {"python": [sys.executable], "megarl": [sys.executable, "-m", "megarl.cli.main"]}
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*own[words[0]], *words[1:]], cwd=folder, env=environment, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def _rows(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the READMEs' commands make, in fewer rows."""
    folder = _folder(tmp_path_factory.mktemp("examples"))
    for name, fewer in (("own_reward", "--train 200 --val 20"), ("agent_with_tools", "--train 200 --val 20")):
        _run(f"{_commands(name)[0]} {fewer}", folder)
    return folder


@pytest.mark.parametrize("name", quick(["own_reward", "own_flow", "agent_with_tools"]))
def test_a_few_steps(ranks: Ranks, data: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    out = data / name
    made = data / "runs" / "examples" / ("products" if name == "agent_with_tools" else "sums")
    code = {"own_reward": ("reward.name", "reward.py:score"), "own_flow": ("trainer.flow", "flow.py:flow")}
    key, place = code.get(name, ("environment.name", "tool.py:Multiplication"))
    overrides = [
        f"{key}={EXAMPLES / name / place}",
        f"data.train_files=[{made / 'train.jsonl'}]",
        f"data.val_files=[{made / 'val.jsonl'}]",
        f"warmup.train_files=[{made / 'demonstrations.jsonl'}]",
        f"actor_rollout_ref.model.tokenizer_path={made / 'tokenizer.model'}",
        f"actor_rollout_ref.model.path={ROOT / 'configs' / 'models' / _model(name)}",
        "warmup.total_training_steps=2",
        "trainer.total_training_steps=2",
        "trainer.val_before_train=false",
        f"trainer.default_local_dir={out}",
    ]
    train_in(ranks, 1, EXAMPLES / name / "run.yaml", *overrides)
    rows = _rows(out)
    assert len(rows) == 4  # two of the supervised phase, two of the loop
    if name == "own_reward":
        assert 0 <= rows[-1]["reward/is_number"] <= 1
    if name == "own_flow":
        assert 0 <= rows[-1]["reward/best"] <= 1
    assert "val/accuracy" in rows[-1]


def _model(name: str) -> str:
    return "tiny_qwen_64" if name == "agent_with_tools" else "tiny_qwen"


def test_every_example_is_in_the_table() -> None:
    table = (EXAMPLES / "README.md").read_text()
    folders = {path.name for path in EXAMPLES.iterdir() if path.is_dir()}
    assert set(re.findall(r"^\| \[(\w+)\]", table, re.MULTILINE)) == folders == set(GAINS)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Runs a command in a folder that all examples share, the first time that a README gives it."""
    folder = _folder(tmp_path_factory.mktemp("commands"))

    @cache
    def run(command: str) -> Path:
        _run(command, folder)
        return folder

    return run


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(GAINS))
def test_the_commands_of_the_readme_train(name: str, prepared: Callable[[str], Path]) -> None:
    if name == "tune":
        pytest.importorskip("optuna")
    for command in _commands(name):
        folder = prepared(command)
    accuracy = [row["val/accuracy"] for row in _rows(folder / "runs" / "examples" / name) if "val/accuracy" in row]
    assert accuracy[-1] > accuracy[0] + GAINS[name], accuracy
