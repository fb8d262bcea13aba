"""Our own checks refuse in one line; another ValueError of the start is a fault of the program, with its traceback."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tiny_run import ROOT, write_run

from megarl.config.refusal import is_refusal
from megarl.parallel.layout import TrainLayout


def _chained() -> None:
    try:
        int("x")
    except ValueError as e:
        raise ValueError("data.key must be a number") from e


@pytest.mark.parametrize(
    ("call", "ours"),
    [
        (lambda: TrainLayout(ranks=range(3), tp=2), True),
        (_chained, True),
        (lambda: int("x"), False),
        (lambda: np.concatenate([]), False),
        (lambda: np.ones(3) + np.ones(2), False),
        (lambda: json.loads("{"), False),
    ],
)
def test_a_raise_of_ours_is_a_refusal(call: Callable[[], object], ours: bool) -> None:
    with pytest.raises(ValueError) as error:
        call()
    assert is_refusal(error.value) == ours


def _start(config: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "megarl.train", str(config), *overrides]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)


@pytest.mark.slow
def test_a_start_tells_them_apart(tmp_path: Path) -> None:
    config = write_run(tmp_path)
    refused = _start(config, "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=3")
    assert refused.returncode == 2 and "Traceback" not in refused.stderr
    assert "megarl: error: 1 ranks cannot be split" in refused.stderr
    by_command = [sys.executable, "-m", "megarl.cli.main", "train", str(config), 'trainer.default_local_dir="a\\0b"']
    failed = subprocess.run(by_command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert failed.returncode == 1 and "ValueError: embedded null byte" in failed.stderr
    failed = _start(config, 'trainer.default_local_dir="a\\0b"')
    assert failed.returncode == 1, failed.stderr
    assert "megarl: rank 0 failed:\nTraceback" in failed.stderr and "ValueError: embedded null byte" in failed.stderr
