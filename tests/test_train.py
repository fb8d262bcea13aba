"""Whole runs through the command line: results, resuming, refusals, and what happens when a rank dies."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

import pytest
from ranks import Ranks, free_port
from tiny_run import FOUR_RANKS, ROOT, TrainedRun, megarl, metrics_of, train_in, write_run

from megarl.endings import ExitCode
from megarl.telemetry.metrics import TIMED


def _numbers(row: dict[str, Any]) -> dict[str, float]:
    return {k: v for k, v in row.items() if not k.startswith(TIMED)}


@pytest.mark.slow
def test_a_run_on_four_ranks_leaves_its_records(trained: TrainedRun) -> None:
    assert "training TP2 x PP2 x DP1, generation TP2 x 2 replicas on 4 cpu ranks" in trained.out
    assert "warm-up 3/3" in trained.out and "RL 4/4" in trained.out

    rows = trained.rows
    assert [row["step"] for row in rows] == [-3, -2, -1, 0, 1, 2, 3, 4]
    assert rows[2]["warmup/loss"] < rows[0]["warmup/loss"]
    assert [row.get("warmup/step") for row in rows[:4]] == [1, 2, 3, None]  # the picture tells the phases apart by it
    assert 0 <= rows[3]["val/accuracy"] <= 1
    for row in rows[4:]:
        assert row["actor/first_ratio_max_deviation"] == 0.0
        assert row["rollout/logp_gap_max"] < 1e-4
        assert row["tokens"] > 64 and row["tokens_per_s"] > 0
        assert {"timing/generate_s", "timing/reshard_s", "timing/log_probs_s", "timing/update_s"} < set(row)
        assert 0 < row["perf/gradient_sync_s"] < row["timing/update_s"]
    run = trained.folder / "run"
    samples = [json.loads(line) for line in (run / "rollouts" / "step_000002.jsonl").read_text().splitlines()]
    assert len(samples) == 8 and all(sample["prompt"].endswith("=") for sample in samples)
    assert "ppo_mini_batch_size: 8" in (run / "config.yaml").read_text()
    assert (run / "metrics.csv").exists() and list((run / "tensorboard").iterdir())


@pytest.mark.slow
def test_a_job_of_two_nodes_trains_as_one_node_does(tmp_path: Path, ranks: Ranks) -> None:
    """A stage on each, and on each two replicas, which share what they take from the other node."""
    configs = {}
    for nodes in (1, 2):
        folder = tmp_path / str(nodes)
        folder.mkdir()
        sections = FOUR_RANKS | {"actor_rollout_ref__rollout__tensor_model_parallel_size": 1}
        configs[nodes] = write_run(folder, **sections)
    of_job = {"NNODES": "2", "NPROC_PER_NODE": "2", "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
    launchers = [
        subprocess.Popen(
            ["bash", "launch/train.sh", str(configs[2])],
            cwd=ROOT,
            env={**os.environ, "MEGARL_PYTHON": sys.executable, **of_job, "NODE_RANK": str(node)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for node in range(2)
    ]
    try:
        for launcher in launchers:
            out, _ = launcher.communicate(timeout=500)
            assert launcher.returncode == 0, out
    finally:
        for launcher in launchers:
            launcher.terminate()  # takes its ranks with it
    train_in(ranks, 4, configs[1])
    one, two = ([_numbers(row) for row in metrics_of(tmp_path / nodes)] for nodes in "12")
    assert one == two


@pytest.mark.slow
def test_a_node_that_dies_in_training_is_named_without_tracebacks(tmp_path: Path) -> None:
    config = write_run(tmp_path, trainer__total_training_steps=10000, trainer__val_before_train=False)
    place = ["--nnodes=2", "--nproc=1", "--master-addr=127.0.0.1", f"--master-port={free_port()}"]
    launchers = [
        subprocess.Popen(
            [sys.executable, "-m", "megarl.cli.main", "train", *place, f"--node-rank={node}", str(config)],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for node in range(2)
    ]
    try:
        metrics = tmp_path / "run" / "metrics.jsonl"
        while not (metrics.exists() and metrics.read_text()):
            assert all(launcher.poll() is None for launcher in launchers)
            time.sleep(0.1)
        launchers[1].kill()
        _, said = launchers[0].communicate(timeout=500)
    finally:
        for launcher in launchers:
            launcher.kill()
    assert launchers[0].returncode == ExitCode.LOST
    assert f"megarl: node 1 of 2 (on {socket.gethostname()}) is gone: its launcher gives no sign of life\n" in said
    assert "Traceback" not in said and "frame #" not in said
    assert len(said.splitlines()) <= 4, said


@pytest.mark.slow
def test_resume_gives_the_same_next_step(tmp_path: Path, ranks: Ranks, trained: TrainedRun) -> None:
    """Gone on with after step 2: steps 3 and 4 have the numbers of the run that went straight through."""
    stopped = tmp_path / "stopped" / "run"
    shutil.copytree(trained.folder / "run", stopped)  # its metrics go on to step 4, as those of a job that died do
    checkpoints = stopped / "checkpoints"
    partial = (checkpoints / "global_step_4").rename(checkpoints / ".global_step_4.partial")
    next(partial.rglob("*.distcp")).unlink()  # it died while it saved
    said = train_in(ranks, 4, trained.config, f"trainer.default_local_dir={stopped}", "trainer.max_ckpt_to_keep=1")
    assert f"resuming from {checkpoints / 'global_step_2'}\n" in said and "resuming from" not in trained.out
    rows = metrics_of(stopped.parent)
    assert [row["step"] for row in rows] == [-3, -2, -1, 0, 1, 2, 3, 4]
    assert [_numbers(row) for row in rows] == [_numbers(row) for row in trained.rows]
    assert rows[-1]["actor/ref_kl"] > 0
    assert os.listdir(checkpoints) == ["global_step_4"]


@pytest.mark.slow
def test_a_checkpoint_goes_on_in_another_layout(tmp_path: Path, ranks: Ranks, trained: TrainedRun) -> None:
    """The same log-probabilities of the same rollouts, to rounding."""
    megatron = "actor_rollout_ref.actor.megatron"
    options = {
        "trainer.default_local_dir": tmp_path / "run",
        "trainer.resume_mode": "resume_path",
        "trainer.resume_from_path": trained.checkpoint(2),
        "trainer.total_training_steps": 3,
        "trainer.save_freq": 0,
        f"{megatron}.pipeline_model_parallel_size": 1,
        "actor_rollout_ref.rollout.tensor_model_parallel_size": 1,
    }
    train_in(ranks, 2, trained.config, *[f"{key}={value}" for key, value in options.items()])
    there, here = trained.rows[-2], metrics_of(tmp_path)[-1]
    assert here["step"] == there["step"] == 3
    for key in ("reward/mean", "actor/pg_loss", "actor/grad_norm", "actor/ref_kl", "actor/entropy"):
        assert here[key] == pytest.approx(there[key], rel=1e-4, abs=1e-6), key


@pytest.mark.slow
def test_a_checkpoint_gives_another_run_its_weights(tmp_path: Path, ranks: Ranks, trained: TrainedRun) -> None:
    config = write_run(
        tmp_path,
        actor_rollout_ref__model__random_init=False,
        actor_rollout_ref__model__checkpoint=str(trained.checkpoint(4)),
        reward__name=trained.reward,
        trainer__total_training_steps=1,
    )
    train_in(ranks, 1, config)
    assert metrics_of(tmp_path)[0]["val/reward"] == trained.rows[-1]["val/reward"] != trained.rows[3]["val/reward"]


REFUSALS = [
    (["data.train_bach_size=4"], "unknown key 'data.train_bach_size'; did you mean 'data.train_batch_size'?"),
    (["data.train_batch_size=many"], "data.train_batch_size: "),
    (["nonsense"], "override 'nonsense' is not of the form key=value"),
    (
        ["actor_rollout_ref.actor.megatron.tensor_model_parallel_size=3", "--nproc=3"],
        "does not divide the model's 4 at",
    ),
    (
        ["actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=5", "--nproc=5"],
        "pipeline_model_parallel_size = 5 is more than the model's 4 layers",
    ),
    (["actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2"], "1 ranks cannot be split into tensor x pipe"),
    (["actor_rollout_ref.rollout.tensor_model_parallel_size=2"], "1 ranks cannot be split into generation replicas"),
    (["actor_rollout_ref.actor.ppo_mini_batch_size=5"], "data.train_batch_size = 16 is not a multiple of actor.ppo_mi"),
    (["actor_rollout_ref.actor.ppo_mini_batch_size=1", "--nproc=3"], "= 4 sequences do not divide over 3 data-parall"),
    (["data.train_batch_size=96"], "data.train_batch_size = 96 is more than the 80 rows of data.train_files"),
    (["data.train_files=[]"], "data.train_files is empty"),
    (["data.train_files=[nowhere/*.jsonl]"], "data.train_files: no file matches 'nowhere/*.jsonl'"),
    (
        ["data.prompt_key=question"],
        "data.prompt_key = 'question': no such column in",
    ),
    (["actor_rollout_ref.model.tokenizer_path=nowhere"], "no tokenizer at 'nowhere'"),
    (["actor_rollout_ref.model.tokenizer_path=README.md"], "README.md"),
    (["actor_rollout_ref.model.path=tests"], "actor_rollout_ref.model.path: no config.json in 'tests'"),
    (
        ["actor_rollout_ref.model.random_init=false"],
        "has no weights: neither model.safetensors nor",
    ),
    (["actor_rollout_ref.model.checkpoint=tests"], "actor_rollout_ref.model.checkpoint: 'tests' is not a checkpoint"),
    (["trainer.resume_mode=resume_path", "trainer.resume_from_path=tests"], "'tests' is not a checkpoint"),
    (["data.max_response_length=64"], "= 72 is more than the model's 32 positions"),
    (["actor_rollout_ref.actor.ppo_max_token_len_per_gpu=8"], "is more than actor.ppo_max_token_len_per_gpu = 8"),
    (["data.max_prompt_length=2"], "train.jsonl:1: the prompt has 4 tokens, more than data.max_prompt_length = 2"),
    (["reward.name=exact_mach"], "exact_match"),
    (["actor_rollout_ref.rollout.top_p=0.9"], "set algorithm.rollout_correction.rollout_is=token"),
    (["actor_rollout_ref.rollout.n=1"], "rollout.n = 1 leaves nothing to compare"),
]


@pytest.mark.parametrize(("arguments", "message"), REFUSALS, ids=[" ".join(a)[:60] for a, _ in REFUSALS])
def test_a_bad_run_is_refused(
    tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    """In this process: nothing may start, so nothing needs a process of its own."""
    from megarl.cli.main import main

    config = write_run(tmp_path_factory.mktemp("refused"))
    options = [a for a in arguments if a.startswith("--")]
    assert main(["train", *options, str(config), *[a for a in arguments if a not in options]]) == 2
    printed = capsys.readouterr().err
    assert message in printed and printed.count("\n") == 1 and printed.startswith("megarl: error: ")


def test_a_run_that_cannot_fit_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a machine whose GPUs have 64 KiB."""
    from megarl.cli.main import main
    from megarl.estimate.accelerator import H200
    from megarl.trainer import memory

    monkeypatch.setattr(memory, "this_accelerator", lambda: replace(H200, memory=2**16))
    assert main(["train", str(write_run(tmp_path, actor_rollout_ref__model__dtype="bfloat16"))]) == 2
    printed = capsys.readouterr().err
    assert printed.count("\n") == 1
    assert re.match(
        r"megarl: error: (generate|reshard) needs 0.00 GiB more than the 0.00 GiB that a rank of pipeline stage 1 has; "
        r"actor.megatron.optimizer_offload=true frees 0.00 GiB, actor.megatron.grad_offload=true frees",
        printed,
    )


def test_a_refusal_leaves_with_code_2(tmp_path: Path) -> None:
    done = megarl("train", str(tmp_path / "none.yaml"))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"megarl: error: no config file at '{tmp_path / 'none.yaml'}'\n"
    rank = subprocess.run(
        [sys.executable, "-m", "megarl.train", str(write_run(tmp_path)), "trainer.stepz=1"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert (rank.returncode, rank.stderr.count("\n")) == (2, 1)
    assert "unknown key 'trainer.stepz'" in rank.stderr
    second = subprocess.run(
        [sys.executable, "-m", "megarl.train", str(tmp_path / "none.yaml")],
        cwd=ROOT,
        env={**os.environ, "RANK": "1"},
        capture_output=True,
        text=True,
    )
    assert second.returncode == 2
    said = f"megarl: rank 1 on {socket.gethostname()}: error: no config file at '{tmp_path / 'none.yaml'}'\n"
    assert second.stderr == said


@pytest.mark.slow
def test_a_reward_that_raises_takes_the_job_down(tmp_path: Path) -> None:
    """On one of two ranks only: the other waits for it, and must not do so for ever."""
    reward = tmp_path / "reward.py"
    reward.write_text(
        "import os\n"
        "def score(response, row):\n"
        "    if os.environ.get('RANK') == '1':\n"  # the trial before the ranks start has none
        "        raise RuntimeError('the judge is out')\n"
        "    return 0.0\n"
    )
    config = write_run(tmp_path, trainer__n_gpus_per_node=2, reward__name=f"{reward}:score", trainer__save_freq=0)
    done = megarl("train", str(config), "trainer.val_before_train=false")
    assert done.returncode == ExitCode.INPUT
    assert "rank 1 failed" in done.stderr
    assert "score raised RuntimeError: the judge is out; row " in done.stderr
    assert f'File "{reward}", line 4, in score\n    raise RuntimeError(' in done.stderr
    assert "rank 0" not in done.stderr  # its connection that broke is no news


def _start(config: Path, *overrides: str, out: IO[str] | int = subprocess.PIPE) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "megarl.cli.main", "train", str(config), *overrides],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=out,
        stderr=subprocess.STDOUT,
        text=True,
    )


def _ranks_of(job: subprocess.Popen[str]) -> list[int]:
    """Process ids of the ranks that are alive, in rank order."""
    found = []
    with suppress(OSError):  # one of them ends just now
        for pid in Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split():
            if b"megarl.train" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(int(pid))
    return found


@pytest.mark.slow
def test_a_killed_rank_takes_the_job_down(tmp_path: Path) -> None:
    config = write_run(tmp_path, trainer__n_gpus_per_node=2, trainer__total_training_steps=10_000)
    job = _start(config)
    assert job.stdout is not None
    for line in job.stdout:
        if "RL 2/" in line:
            break
    ranks = _ranks_of(job)
    assert len(ranks) == 2
    os.kill(ranks[1], signal.SIGKILL)
    out, _ = job.communicate(timeout=300)
    assert job.returncode == 128 + signal.SIGKILL
    said = [line for line in out.splitlines() if not line.startswith("RL ")]
    killed = f"megarl: rank 1 (pid {ranks[1]} on {socket.gethostname()}) was killed by SIGKILL"
    (line,) = [line for line in said if line.startswith(killed)]  # on a busy machine rank 0 may say so, too
    assert not any("Traceback" in line for line in said), said
    held, whole = map(
        float, re.findall(r"(\d+\.\d) GiB", line.removeprefix(f"{killed}; if nobody sent it, memory ran "))
    )
    assert 0 < held < whole
    assert not Path(f"/proc/{ranks[0]}").exists()


DIES_IN_A_RESHARD = '''
import os, signal, sys, threading, time
from pathlib import Path

from megarl.flows import ppo

def watch(thread, note):
    """Ends the process when it finds the main thread between the beginning and the end of a reshard's transport."""
    while True:
        frame = sys._current_frames()[thread]
        while frame is not None:
            code = frame.f_code
            if code.co_name == "run" and code.co_filename.endswith("reshard/transport/collective.py"):
                note.write_text(f"{os.getpid()} {frame.f_lineno}")
                os.kill(os.getpid(), signal.SIGKILL)
            frame = frame.f_back
        time.sleep(1e-4)

def flow(run):
    if os.environ["RANK"] == "1":
        note = Path(__file__).with_name("died")
        threading.Thread(target=watch, args=(threading.main_thread().ident, note), daemon=True).start()
    ppo.flow(run)
'''


@pytest.mark.slow
def test_a_rank_lost_during_a_reshard_takes_the_job_down(tmp_path: Path) -> None:
    """The others wait for its bytes at that moment, and must not do so for ever."""
    (tmp_path / "flow.py").write_text(DIES_IN_A_RESHARD)
    config = write_run(
        tmp_path,
        **FOUR_RANKS,
        trainer__flow=f"{tmp_path / 'flow.py'}:flow",
        trainer__total_training_steps=10_000,
        trainer__val_before_train=False,
    )
    note, ranks = tmp_path / "died", set[int]()
    with open(tmp_path / "log", "w+", encoding="utf-8") as log:
        job = _start(config, "actor_rollout_ref.reshard.bucket_bytes=1024", out=log)
        while job.poll() is None:
            ranks |= set(_ranks_of(job))
            time.sleep(0.05)
        log.seek(0)
        assert f"(pid {note.read_text().split()[0]} on {socket.gethostname()}) was killed by SIGKILL" in log.read()
    assert job.returncode == 128 + signal.SIGKILL
    assert len(ranks) == 4 and not any(Path(f"/proc/{rank}").exists() for rank in ranks)
