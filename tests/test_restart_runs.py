"""Whole runs whose ranks are lost: `megarl train --restarts`, several nodes, and torchrun."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from kill_and_resume import last_checkpoint
from ranks import free_port
from tiny_run import ROOT, metrics_of, numbers_of, write_run

HOST = socket.gethostname()
KILLED = 128 + signal.SIGKILL

DIES = '''
import os, signal
import torch
from megarl import Phase
from megarl.flows import ppo

def flow(run):
    """Ends the process of a rank as DEATHS says, {rank: step}, once each; with MEMORY its memory runs out instead."""
    deaths = dict(word.split(":") for word in os.environ["DEATHS"].split())
    rank = os.environ["RANK"]
    mark = os.path.join(os.path.dirname(__file__), "died-" + rank)
    steps = run.steps
    def dying(*args, **kwargs):
        for step in steps(*args, **kwargs):
            if str(step) == deaths.get(rank) and not os.path.exists(mark):
                open(mark, "w").close()
                if "MEMORY" not in os.environ:
                    os.kill(os.getpid(), signal.SIGKILL)
                with run.phase(Phase.UPDATE):
                    raise torch.OutOfMemoryError("CUDA out of memory.")
            yield step
    run.steps = dying
    ppo.flow(run)
'''


def dying_run(folder: Path, **sections: Any) -> Path:
    """A run of six steps with two ranks, one of which dies as the variable DEATHS says."""
    folder.mkdir(exist_ok=True)
    (folder / "flow.py").write_text(DIES)
    settings = {
        "trainer__n_gpus_per_node": 2,
        "trainer__total_training_steps": 6,
        "trainer__save_freq": 2,
        "trainer__val_before_train": False,
        "trainer__test_freq": 0,
        "trainer__flow": f"{folder / 'flow.py'}:flow",
        "checkpoint__async_save": False,  # so that the newest checkpoint is known when a rank dies
    }
    return write_run(folder, **{**settings, **sections})


def start(command: list[str], deaths: str = "", **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", *command],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "DEATHS": deaths, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def train(config: Path, *words: str, deaths: str = "", **environment: str) -> subprocess.Popen[str]:
    return start(["megarl.cli.main", "train", "--restart-wait", "0.1", *words, str(config)], deaths, **environment)


def end_of(job: subprocess.Popen[str]) -> tuple[int, list[str]]:
    """Its exit code, and what it said of restarts."""
    out, _ = job.communicate(timeout=500)
    return job.returncode, [line for line in out.splitlines() if "; restart " in line or "; going on" in line] or [out]


def same_end(one: Path, other: Path) -> None:
    """Two runs end with the same bits, and have the same numbers."""
    first, second = last_checkpoint(one / "run"), last_checkpoint(other / "run")
    assert first.keys() == second.keys()
    assert [name for name in first if not torch.equal(first[name], second[name])] == []
    assert numbers_of(one) == numbers_of(other)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    code, said = end_of(train(dying_run(folder)))
    assert code == 0, said
    return folder


@pytest.mark.slow
def test_a_run_whose_ranks_are_killed_goes_on_to_the_same_bits(tmp_path: Path, undisturbed: Path) -> None:
    """Rank 1 in step 4, rank 0 in step 6: each time from the newest checkpoint."""
    code, said = end_of(train(dying_run(tmp_path), "--restarts", "2", deaths="0:6 1:4"))
    assert code == 0 and said == [
        f"megarl: rank 1 on {HOST} was killed (SIGKILL) after step 3; restart 1 of 2 from global_step_2 in 0.1 s",
        f"megarl: rank 0 on {HOST} was killed (SIGKILL) after step 5; restart 1 of 2 from global_step_4 in 0.1 s",
    ]
    same_end(tmp_path, undisturbed)


@pytest.mark.slow
def test_torchrun_starts_a_killed_rank_again(tmp_path: Path, undisturbed: Path) -> None:
    """The group that torchrun starts again goes on from the newest checkpoint, to the same bits."""
    config = dying_run(tmp_path)
    command = ["torch.distributed.run", "--nproc_per_node", "2", "--max-restarts", "3", "-m", "megarl.train"]
    job = start([*command, str(config)], deaths="1:4")
    out, _ = job.communicate(timeout=500)
    assert job.returncode == 0, out
    assert f"resuming from {tmp_path / 'run' / 'checkpoints' / 'global_step_2'}\n" in out
    same_end(tmp_path, undisturbed)


@pytest.mark.slow
def test_a_run_whose_memory_runs_out_goes_on_with_smaller_micro_batches(tmp_path: Path, undisturbed: Path) -> None:
    """The step after the checkpoint has the same metrics, and so, nearly, has the end; a later start remembers."""
    config, key = dying_run(tmp_path), "actor_rollout_ref.actor.ppo_max_token_len_per_gpu"
    code, said = end_of(train(config, "--restarts", "1", deaths="1:4", MEMORY="ends"))
    assert code == 0 and said == [
        f"megarl: rank 1 on {HOST} ran out of GPU memory in the phase update after step 3; "
        f"restart 1 of 1 from global_step_2 in 0.1 s, with {key}=128"
    ]
    for one, other in zip(numbers_of(tmp_path), numbers_of(undisturbed), strict=True):
        assert one == pytest.approx(other, rel=1e-4, abs=1e-6)
    first, second = last_checkpoint(tmp_path / "run"), last_checkpoint(undisturbed / "run")
    for name, value in first.items():
        if value.is_floating_point():
            torch.testing.assert_close(value, second[name], rtol=1e-3, atol=1e-5)
    code, said = end_of(train(config))
    assert (
        code == 0
        and f"megarl: {key}=128: memory ran out with more ({tmp_path / 'run' / 'less_memory.json'})" in said[0]
    )


ALONE = """
import sys
import megarl.nodes
from megarl.cli.main import main
megarl.nodes.REJOIN_SECONDS = 3.0
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_a_run_goes_on_without_a_node_that_is_gone_for_good(tmp_path: Path) -> None:
    """Two nodes with one rank each; the launcher of the second is killed after step 3, and the first goes on alone."""
    config = dying_run(tmp_path, trainer__total_training_steps=40)
    place = ["--nnodes=2", "--nproc=1", "--master-addr=127.0.0.1", f"--master-port={free_port()}"]
    words = ["train", *place, "--restarts=2", "--restart-wait=0.1", "--min-nodes=1", str(config)]
    jobs = [
        subprocess.Popen(
            [sys.executable, "-c", ALONE, *words, f"--node-rank={node}"],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "DEATHS": ""},
            stdout=subprocess.PIPE if node == 0 else subprocess.DEVNULL,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for node in range(2)
    ]
    try:
        while not (tmp_path / "run" / "checkpoints" / "global_step_2").exists():
            assert all(job.poll() is None for job in jobs)
            time.sleep(0.1)
        jobs[1].kill()
        code, said = end_of(jobs[0])
    finally:
        for job in jobs:
            job.kill()
            job.wait()
    assert code == 0, said
    assert said[-1].endswith(f"; node 1 of 2 (on {HOST}) did not come back; going on with 1 of 2 nodes"), said
    assert [row["step"] for row in metrics_of(tmp_path)] == list(range(1, 41))
    kept = [json.loads(line) for line in (tmp_path / "run" / "restarts.jsonl").read_text().splitlines()]
    assert [line["attempt"] for line in kept] == [0, 2]
    assert re.match(r"restart 1 of 2 from global_step_\d+ in 0.1 s", kept[0]["decision"])
