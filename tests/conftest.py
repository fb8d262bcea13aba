"""Fixtures shared by all tests."""

from __future__ import annotations

import fcntl
import gc
import os
import shutil
import subprocess
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import HealthCheck, settings

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # Triton reads it where it is first imported, by whatever test

from ranks import Ranks
from run_cases import run_here
from tiny_run import FINGERPRINT, FOUR_RANKS, TrainedRun, megarl, write_run

ROOT = Path(__file__).parents[1]
settings.register_profile("busy machine", suppress_health_check=[HealthCheck.too_slow], deadline=None)
settings.load_profile("busy machine")
if "PYTEST_XDIST_WORKER" in os.environ:  # the process that collects
    gc.disable()  # until all tests are there: modules that are loaded leave nothing to find
# there is a process for each core: threads of each would wait for those of the others, spinning
torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--slow-part", metavar="I/N", default="1/1", help="run the I-th of N parts of the slow tests, not all of them"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out other parts of the slow tests, then put files of slow tests first.

    Each file is one worker's, and at the end the others would wait for it.
    """
    part, parts = map(int, config.getoption("--slow-part").split("/"))
    others = [
        item
        for item in items
        if item.get_closest_marker("slow") and zlib.crc32(item.nodeid.encode()) % parts != part - 1
    ]
    if others:
        config.hook.pytest_deselected(items=others)
        left_out = set(others)
        items[:] = [item for item in items if item not in left_out]
    slow = Counter(item.path for item in items if item.get_closest_marker("slow"))
    tests = Counter(item.path for item in items)
    items.sort(key=lambda item: -slow[item.path] / tests[item.path])


def pytest_collection_finish() -> None:
    gc.freeze()  # modules stay: the collections during tests need not look at them
    gc.enable()


@pytest.fixture(autouse=True)
def environment_given_back() -> Iterator[None]:
    """A command that runs in this process may hide its GPUs from all that comes after."""
    with patch.dict(os.environ):
        yield


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """A pool of gloo ranks that lives as long as the test session."""
    pool = Ranks()
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Chromium; tests that ask for it are marked `needs_chromium`."""
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = str(shutil.which("chromium"))
    for word in ("headless=new", "no-sandbox", "disable-gpu", "disable-dev-shm-usage", "window-size=1440,900"):
        options.add_argument(f"--{word}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options, webdriver.ChromeService(shutil.which("chromedriver")))
    driver.set_script_timeout(60)
    yield driver
    driver.quit()


def made_once(tmp_path_factory: pytest.TempPathFactory, name: str, make: Callable[[Path], str]) -> TrainedRun:
    """A run that the first of all workers makes, which returns what it printed; tests only read it."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / name
    said = folder / "said"
    with open(f"{folder}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not said.exists():
            shutil.rmtree(folder, ignore_errors=True)  # of a worker that failed to make it
            folder.mkdir()
            out = make(folder)
            said.write_text(out)
    return TrainedRun(config=folder / "run.yaml", folder=folder, out=said.read_text())


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> TrainedRun:
    """A run of four ranks with a warm-up, a reference, validation, checkpoints, exports and all records on disk."""
    return made_once(tmp_path_factory, "trained", _trained)


def _trained(folder: Path) -> str:
    (folder / "reward.py").write_text(FINGERPRINT)
    config = write_run(
        folder,
        **FOUR_RANKS,
        actor_rollout_ref__actor__use_kl_loss=True,
        actor_rollout_ref__actor__kl_loss_coef=0.1,
        algorithm={"use_kl_in_reward": True, "kl_ctrl": {"type": "adaptive", "kl_coef": 0.1, "target_kl": 0.01}},
        reward__name=f"{folder / 'reward.py'}:score",
        warmup={"total_training_steps": 3, "train_batch_size": 20},
        trainer__logger=["console", "jsonl", "csv", "tensorboard"],
        trainer__total_training_steps=4,
        trainer__save_freq=2,
        trainer__test_freq=1,
        checkpoint__save_contents=["model", "optimizer", "hf_model"],
    )
    done = megarl("train", str(config))
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="session")
def small(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> TrainedRun:
    """A run of two steps on two ranks, validated and saved after both; rank 1's second step is profiled."""
    return made_once(tmp_path_factory, "small", partial(_small, ranks))


def _small(ranks: Ranks, folder: Path) -> str:
    (folder / "reward.py").write_text(FINGERPRINT)
    config = write_run(
        folder,
        reward__name=f"{folder / 'reward.py'}:score",
        actor_rollout_ref__rollout__tensor_model_parallel_size=2,
        trainer__n_gpus_per_node=2,
        trainer__save_freq=1,
        trainer__test_freq=1,
        trainer__logger=["jsonl"],
        checkpoint__save_contents=["model", "optimizer", "hf_model"],
        profiler={"tool": "torch", "steps": [2], "ranks": [1]},
    )
    ended, said = ranks.run(2, run_here, str(config))[0]
    assert ended == "", said
    return said


@pytest.fixture(scope="session")
def smollm2() -> str:
    """Folder of SmolLM2-135M-Instruct, made once; tests that need it are skipped where it cannot be downloaded."""
    folder = ROOT / ".cache" / "smollm2"
    done = subprocess.run(
        [sys.executable, ROOT / "tools" / "fetch_smollm2.py", folder], capture_output=True, text=True, timeout=300
    )
    if done.returncode:
        pytest.skip(f"no SmolLM2: {done.stderr.strip().splitlines()[-1]}")
    return str(folder)
