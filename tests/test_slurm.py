"""Jobs on a real Slurm: what ends them, what is requeued and goes on, and what is not."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from slurm_cluster import Cluster, Job, missing, slurm_cluster
from test_stopping import processes_of
from tiny_run import ROOT, metrics_of, write_run

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(missing()), reason=missing())]
TRAIN, ARRAY = "slurm/train.sbatch", "slurm/array.sbatch"
REWARD = """
import os, time
def score(response, row):
    time.sleep(0.0 if os.path.exists({go!r}) else 0.05)
    return 0.5
"""

PLACE_OF_A_RUN = """#!/bin/bash
trap 'exit 138' USR1
trap 'exit 143' TERM
echo "begins on $SLURMD_NODENAME"
until [[ -e {go} ]]; do sleep 0.2; done
"""
WAITS = (TRAIN, "configs/quickstart.yaml")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with slurm_cluster(tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A run on two nodes that takes its time until `go` is in its folder."""
    (tmp_path / "reward.py").write_text(REWARD.format(go=str(tmp_path / "go")))
    return write_run(
        tmp_path,
        reward__name=f"{tmp_path / 'reward.py'}:score",
        trainer__n_gpus_per_node=1,
        trainer__nnodes=2,
        trainer__total_training_steps=10_000,
        trainer__save_freq=-1,
        trainer__val_before_train=False,
    )


@pytest.fixture
def waiting(tmp_path: Path) -> dict[str, str]:
    """Variables for a job whose tasks take the place of runs: they begin at once, and end as runs do."""
    (tmp_path / "waits").write_text(PLACE_OF_A_RUN.format(go=tmp_path / "go"))
    (tmp_path / "waits").chmod(0o755)
    return {"MEGARL_PYTHON": str(tmp_path / "waits")}


def end_of(job: Job, config: Path) -> str:
    """Let a requeued job go on to the last step; returns its output."""
    (config.parent / "go").touch()
    job.start_again()
    out = job.until("COMPLETED", "FAILED", "CANCELLED")
    assert job["JobState"] == "COMPLETED", out
    return out


def steps_of(config: Path) -> list[int]:
    return [row["step"] for row in metrics_of(config.parent)]


def test_the_time_limit_saves_and_the_requeued_job_goes_on_to_the_end(cluster: Cluster, config: Path) -> None:
    """Slurm sends the signal 90 to 120 seconds after the start."""
    job = cluster.submit("--time=3", "--signal=USR1@60", TRAIN, str(config), "trainer.total_training_steps=100")
    start = 2
    while "; checkpoint " not in job.until_said(f"the job is requeued for start {start} of at most 21"):
        job.start_again()  # a busy machine had not come to the first step
        start += 1
    out = end_of(job, config)
    stops = re.findall(r"stopped by SIGUSR1 after step (\d+); checkpoint ", out)
    assert stops  # more than one where a busy machine came to the limit again
    assert all(f"resuming from {config.parent}/run/checkpoints/global_step_{step}\n" in out for step in stops)
    assert int(job["Restarts"]) == start - 2 + len(stops)
    assert steps_of(config) == list(range(1, 101))
    assert "communication: no NCCL_*, GLOO_*, UCX_* or FI_* variable is set\n" in out


def test_a_node_that_is_lost_twice_is_left_out(cluster: Cluster, waiting: dict[str, str], tmp_path: Path) -> None:
    """Once it runs a task, once the script, too."""
    job = cluster.submit("--nodelist=n0,n1", *WAITS, **waiting)
    losses = ROOT / ".cache" / f"slurm-{job.number}.lost"
    job.until_said("begins on n1")
    cluster.lose_node("n1")
    job.until("PENDING")
    assert losses.read_text().split() == ["n1"]
    cluster.start_node("n1")
    cluster.call("scontrol", "update", f"JobId={job.number}", "ReqNodeList=n1,n2")
    job.start_again()
    job.until_said("begins on n2")
    assert losses.read_text().split() == ["n1", "n1"]  # the second one is the script's node, until it says otherwise
    cluster.lose_node("n1")
    job.until("PENDING")
    cluster.start_node("n1")
    job.start_again()
    job.until_said("n1 was lost twice and is left out; the job is requeued for start 4 of at most 21")
    cluster.call("scontrol", "update", f"JobId={job.number}", "ReqNodeList=")
    job.start_again()
    job.until_said("(?s)n1 was lost twice.*begins on n0")
    assert job["ExcNodeList"] == "n1" and job["NodeList"] == "n[0,2]"
    (tmp_path / "go").touch()
    job.until("COMPLETED")
    assert not losses.exists()


def test_a_preempted_job_is_requeued(cluster: Cluster, waiting: dict[str, str], tmp_path: Path) -> None:
    job = cluster.submit(*WAITS, **waiting)
    job.until_said("begins on n0")
    urgent = cluster.submit("--partition=urgent", "--nodes=3", "--exclusive", "--wrap=sleep 1")
    job.until_said("the job is preempted; the job is requeued for start 2 of at most 21")
    urgent.until("COMPLETED")
    (tmp_path / "go").touch()
    job.start_again()
    assert job.until("COMPLETED").count("begins on n0") == 2


def test_a_job_that_is_cancelled_or_ended_by_sigterm_is_not_requeued(cluster: Cluster, waiting: dict[str, str]) -> None:
    jobs = [cluster.submit("--nodes=1", *WAITS, **waiting) for _ in range(2)]
    for job in jobs:
        job.until_said("begins on ")
    jobs[0].signal("TERM")
    assert "requeued" not in jobs[0].until("FAILED") and jobs[0]["ExitCode"] == "143:0"
    cluster.call("scancel", jobs[1].number)
    assert "requeued" not in jobs[1].until("CANCELLED")
    assert [job["Restarts"] for job in jobs] == ["0", "0"]


def test_a_job_is_not_requeued_for_ever(cluster: Cluster, waiting: dict[str, str]) -> None:
    job = cluster.submit(*WAITS, **waiting, MAX_RESTARTS="1")
    job.until_said("begins on n0")
    job.signal("USR1")
    job.until_said("the run was stopped by SIGUSR1; the job is requeued for start 2 of at most 2\n")
    job.start_again()
    job.until_said("(?s)start 2 .*begins on n0")
    job.signal("USR1")
    said = "the run was stopped by SIGUSR1; the job was started 2 times, and is not requeued (MAX_RESTARTS=1)\n"
    assert job.until("FAILED").endswith(f"megarl: {said}")


def test_a_killed_rank_ends_the_job(cluster: Cluster, config: Path) -> None:
    job = cluster.submit(TRAIN, str(config))
    job.until_said("RL 2/")
    ranks = [pid for pid, said in processes_of(config.parent).items() if " RANK=1 " in said]
    os.kill(ranks[0], signal.SIGKILL)
    out = job.until("FAILED")
    assert (job["ExitCode"], job["Restarts"]) == ("137:0", "0")
    assert re.search(r"megarl: rank 1 \(pid \d+ on .*\) was killed by SIGKILL", out) and "requeued" not in out


REFUSED = [
    (["data.train_bach_size=3"], {}, "megarl: error: unknown key 'data.train_bach_size'; did you mean"),
    ([], {"MASTER_ADDR": "no-such-host.invalid"}, "finds no address of node 0's host 'no-such-host.invalid'"),
]


@pytest.mark.parametrize(("words", "environment", "said"), REFUSED, ids=["key", "head"])
def test_a_refused_run_is_not_requeued(
    cluster: Cluster, config: Path, words: list[str], environment: dict[str, str], said: str
) -> None:
    job = cluster.submit(TRAIN, str(config), *words, **environment)
    out = job.until("FAILED")
    lines = [line for line in out.splitlines() if said in line]
    assert (job["ExitCode"], job["Restarts"], len(lines)) == ("2:0", "0", 2) and "RL 1/" not in out, out


def test_a_job_of_several_components_is_refused(cluster: Cluster, config: Path) -> None:
    job = cluster.submit("--nodes=1", ":", "--nodes=1", TRAIN, str(config))
    out = job.until("FAILED")
    assert out == (
        "megarl: this job has 2 components (sbatch ... : ...), and all nodes of a run are alike; submit one component\n"
    )


def test_the_hosts_are_compared_before_the_run(cluster: Cluster, config: Path) -> None:
    """Two ranks per node, which see the variables of a file; the environment's own ones come first."""
    (config.parent / "nccl.env").write_text("# a comment\nGLOO_SOCKET_IFNAME=none\nNCCL_DEBUG=WARN\n")
    variables = {"NCCL_ENV": str(config.parent / "nccl.env"), "GLOO_SOCKET_IFNAME": "lo"}
    words = [TRAIN, str(config), "trainer.total_training_steps=1"]
    job = cluster.submit(*words, PREFLIGHT="1", NPROC_PER_NODE="2", **variables)
    out = job.until("COMPLETED", "FAILED")
    assert job["JobState"] == "COMPLETED", out
    assert "megarl: communication: GLOO_SOCKET_IFNAME=lo NCCL_DEBUG=WARN\n" in out
    assert re.search(r"^host +GPUs +MHz +link GB/s(.*\n)node 0 on .*\nnode 1 on .*\n", out, re.MULTILINE)
    assert "4 CPU ranks over gloo: 8 MiB in " in out and "The hosts are alike.\n" in out and "RL 1/1 " in out


def test_an_array_trains_with_the_keys_of_each_line(cluster: Cluster, config: Path) -> None:
    (config.parent / "sweep.txt").write_text("data.seed=1\ndata.seed='2' trainer.project_name='a b'\n")
    words = ["trainer.nnodes=1", "trainer.total_training_steps=1"]
    jobs = cluster.submit(
        "--array=1-2",
        ARRAY,
        str(config),
        str(config.parent / "sweep.txt"),
        *words,
        SWEEP_DIR=str(config.parent / "sweep"),
    )
    for task, seed in ((1, 1), (2, 2)):
        Job(cluster, f"{jobs.number}_{task}").until("COMPLETED")
        folder = config.parent / "sweep" / str(task)
        assert [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()] == [1]
        assert f"seed: {seed}\n" in (folder / "config.yaml").read_text()
