"""Importing the package leaves torch as it was; only ranks change it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from ranks import Ranks, free_port
from selection import quick
from tiny_run import numbers_of, train_in, write_run

ROOT = Path(__file__).parents[1]

NO_RANKS = """
import importlib, inspect, sys
import torch

if WITH_MEGATRON:
    import torch._dynamo  # torch's compiler, which Megatron-Core loads, wraps some of torch's functions itself

def seen():
    places = {"torch": torch, "Tensor": torch.Tensor, "cuda": torch.cuda}
    found = {(at, name): inspect.getattr_static(x, name) for at, x in places.items() for name in dir(x)}
    return {key: thing for key, thing in found.items() if callable(thing)}

before = seen()
for name in (
    "megarl", "megarl.parallel.world", "megarl.parallel.cpu", "megarl.config", "megarl.types", "megarl.registry",
    "megarl.rewards", "megarl.data.prompts", "megarl.telemetry.sinks", "megarl.rollout.kinds",
    "megarl.rollout.native.engine", "megarl.trainer.admission.checks", "megarl.trainer.inputs", "megarl.launcher",
):
    importlib.import_module(name)
assert "megatron" not in sys.modules and "transformer_engine" not in sys.modules and "apex" not in sys.modules
if WITH_MEGATRON:
    importlib.import_module("megarl.trainer.session.take_part")
    importlib.import_module("megarl.checkpoint.megatron_folder")
    assert "megatron.core" in sys.modules and sys.modules.get("transformer_engine", 0) is not None
after = seen()
changed = [".".join(key) for key, thing in before.items() if after.get(key) is not thing]
assert not changed, changed
assert {("torch", "empty"), ("torch", "compile"), ("Tensor", "cuda"), ("cuda", "current_device")} <= before.keys()
"""

LATE = """
import sys
import megarl.trainer.session.take_part, megarl.roles.trained  # and Megatron-Core with them
from tiny_run import train
print(train(sys.argv[1], []))
"""


def python(code: str, *args: str, **environment: str) -> None:
    path = f"{ROOT}:{ROOT / 'tests'}"
    done = subprocess.run(
        [sys.executable, "-c", code, *args],
        env={**os.environ, "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("with_megatron", quick([False, True], 0))
def test_importing_changes_nothing_in_torch(with_megatron: bool) -> None:
    python(f"WITH_MEGATRON = {with_megatron}\n{NO_RANKS}")


def test_a_launcher_does_without_megatron() -> None:
    """It checks a run in half of the time."""
    python("import sys, megarl.supervisor\nassert not [name for name in sys.modules if name.startswith('megatron')]")


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="nothing is redirected where there is a GPU")
def test_megatron_may_be_imported_before_the_ranks_begin(tmp_path: Path, ranks: Ranks) -> None:
    """The numbers are those of a run that begins as a rank does: nothing is compiled."""
    rows = {}
    for name in ("late", "usual"):
        folder = tmp_path / name
        folder.mkdir()
        config = write_run(folder, trainer__logger=["jsonl"], trainer__total_training_steps=1)
        if name == "usual":
            train_in(ranks, 1, config)
        else:
            one = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "OMP_NUM_THREADS": "1"}
            python(LATE, str(config), **one, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
        rows[name] = numbers_of(folder)
    assert rows["late"] == rows["usual"]
