"""Ranks that read or compute something else than rank 0 end the run, and say what it is and where."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ranks import Ranks, free_port
from run_cases import run_here
from tiny_run import ROOT, metrics_of, write_run

HOST = socket.gethostname()
QUIET: dict[str, Any] = {"trainer__val_before_train": False, "trainer__test_freq": 0, "trainer__logger": ["jsonl"]}
TENSOR_PARALLEL = {"actor_rollout_ref__actor__megatron__tensor_model_parallel_size": 2}
"""Both ranks have the same tokens."""


def two_views(tmp_path: Path, **sections: Any) -> tuple[Path, Path]:
    """The same configuration with relative paths, and two folders in which it finds different files."""
    folders = []
    for name in ("0", "1"):
        (tmp_path / name).mkdir()
        write_run(tmp_path / name, **QUIET, **sections)
        folders.append(tmp_path / name)
    return folders[0], folders[1]


CASES = [
    ("train.jsonl", {"data__train_files": ["train.jsonl"]}, "training prompts (data.train_files)"),
    ("val.jsonl", {"data__val_files": ["val.jsonl"]}, "held-out prompts (data.val_files)"),
]


@pytest.mark.parametrize(("file", "sections", "part"), CASES, ids=[file for file, *_ in CASES])
def test_other_rows_on_one_rank(
    ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, sections: dict[str, Any], part: str
) -> None:
    """The same rows in another order, as a listing that lags gives them."""
    here, there = two_views(tmp_path, **sections)
    rows = (there / file).read_text().splitlines()
    (there / file).write_text("\n".join([*rows[1:], rows[0]]) + "\n")
    results = ranks.run(2, run_in, str(here), str(there), str(here / "run.yaml"))
    for ended, _ in results:
        assert ended == (
            f"RunRefused: the ranks differ in their {part}: rank 1 on {HOST} and rank 0 on {HOST}; put the files where "
            "every node sees the same ones, or copy them again"
        )


def test_a_folder_that_one_rank_does_not_see(ranks: Ranks, tmp_path: Path) -> None:
    here, there = two_views(tmp_path, trainer__default_local_dir="run", trainer__save_freq=1)
    results = ranks.run(2, run_in, str(here), str(there), str(here / "run.yaml"))
    for ended, _ in results:
        assert ended == (
            f"RunRefused: rank 1 on {HOST} does not see run/config.yaml: the run's folder must be on a filesystem that "
            "all nodes share"
        )


def test_another_configuration_on_one_rank(ranks: Ranks, tmp_path: Path) -> None:
    config = write_run(tmp_path, **QUIET)
    results = ranks.run(2, with_its_own_key, str(config))
    assert all("RunRefused: the ranks differ in their configuration: rank 1 on" in ended for ended, _ in results)


def test_arithmetic_that_differs_in_one_bit(ranks: Ranks, tmp_path: Path) -> None:
    """From the second step on; the ranks look at each other's at every second step."""
    keys = {"trainer__agreement_freq": 2, "trainer__total_training_steps": 5}
    config = write_run(tmp_path, **QUIET, **keys, **TENSOR_PARALLEL)
    for ended, _ in ranks.run(2, run_here, str(config), [], "another_advantage_on_rank_1"):
        assert ended.startswith(f"RunStopped: step 2: rank 1 computed other advantages than rank 0, on {HOST} (")
    assert [row["step"] for row in metrics_of(tmp_path)] == [1]


@pytest.mark.parametrize("key", ["actor_rollout_ref__actor__policy_loss__loss_mode", "algorithm__adv_estimator"])
def test_another_file_of_the_user_s_on_one_rank(ranks: Ranks, tmp_path: Path, key: str) -> None:
    here, there = two_views(tmp_path, **{key: "mine.py:mine"})
    (here / "mine.py").write_text(
        "from megarl.algorithms.losses.vanilla import vanilla as mine\n"
        if "loss" in key
        else "from megarl.algorithms.estimators.grpo import grpo as mine\n"
    )
    (there / "mine.py").write_text((here / "mine.py").read_text() + "# of yesterday\n")
    name = key.replace("__", ".")
    for ended, _ in ranks.run(2, run_in, str(here), str(there), str(here / "run.yaml")):
        assert ended == (
            f"RunRefused: the ranks differ in their file of {name}: rank 1 on {HOST} and rank 0 on {HOST}; put the "
            "files where every node sees the same ones, or copy them again"
        )


@pytest.mark.slow
def test_nodes_with_different_code_do_not_train_together(tmp_path: Path) -> None:
    """The same version number, and one file that differs: both refuse, in a line."""
    other = tmp_path / "other"
    shutil.copytree(ROOT / "megarl", other / "megarl", ignore=shutil.ignore_patterns("__pycache__"))
    with open(other / "megarl" / "algorithms" / "losses" / "vanilla.py", "a") as f:
        f.write("# another line\n")
    config = write_run(tmp_path, **QUIET, reward__trial=0)
    place = ["--nnodes=2", "--nproc=1", "--master-addr=127.0.0.1", f"--master-port={free_port()}"]
    nodes = [
        subprocess.Popen(
            [sys.executable, "-m", "megarl.cli.main", "train", *place, f"--node-rank={number}", str(config)],
            cwd=folder,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stderr=subprocess.PIPE,
            text=True,
        )
        for number, folder in enumerate((ROOT, other))
    ]
    said = [node.communicate(timeout=300)[1] for node in nodes]
    line = f"error: the ranks differ in their code of megarl: rank 1 on {HOST} and rank 0 on {HOST}; install the same"
    assert [node.returncode for node in nodes] == [2, 2]
    assert any(line in text for text in said) and all(len(text.splitlines()) <= 1 for text in said), said


def run_in(here: str, there: str, config: str) -> tuple[str, str]:
    """Rank 0 works in one folder, rank 1 in the other."""
    import os

    os.chdir(here)
    return run_here(config, folder=there)


def with_its_own_key(config: str) -> tuple[str, str]:
    import torch.distributed as dist

    return run_here(config, [f"trainer.log_rollouts={dist.get_rank()}"])
