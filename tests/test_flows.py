"""A user's own flow against the public face: it trains, it is killed, and it goes on as if nothing had been."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from kill_and_resume import tensors_of
from ranks import Ranks
from run_cases import run_here
from tiny_run import ROOT, megarl, metrics_of, numbers_of, write_run

FLOW = Path(__file__).parent / "user_flow.py"
SETTINGS: dict[str, Any] = {
    "actor_rollout_ref__actor__megatron": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "trainer__n_gpus_per_node": 2,
    "trainer__save_freq": 1,
    "trainer__test_freq": 2,
    "trainer__flow": f"{FLOW}:flow",
    "warmup": {"total_training_steps": 2, "train_batch_size": 20},
}
LOOPS = ["sft"] * 2 + ["judge"] * 2 + ["rl"] * 4 + ["best"] * 2  # the first row of "rl" is a validation


def _loop_of(row: dict[str, Any]) -> str:
    return next((loop for loop in ("sft", "judge", "best") if f"{loop}/step" in row), "rl")


def _kill_after(rows: int, config: Path, folder: Path) -> None:
    """Start the run as a user does, and kill all of it with SIGKILL when so many steps are in its records."""
    command = [sys.executable, "-m", "megarl.cli.main", "train", "--flow", f"{FLOW}:flow", str(config)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True, stdout=subprocess.DEVNULL) as run:
        records, until = folder / "run" / "metrics.jsonl", time.monotonic() + 120
        while not records.exists() or len(records.read_text().splitlines()) < rows:
            assert run.poll() is None and time.monotonic() < until
            time.sleep(0.02)
        os.killpg(run.pid, signal.SIGKILL)


@pytest.mark.slow
def test_a_users_flow_is_killed_and_goes_on(ranks: Ranks, tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    for folder in (whole, killed):
        folder.mkdir()
    ended, said = ranks.run(2, run_here, str(write_run(whole, **SETTINGS)))[0]
    assert ended == "", said
    rows = numbers_of(whole)
    assert [(_loop_of(row), row["step"]) for row in rows] == [(loop, i) for i, loop in enumerate(LOOPS, 1)]
    assert all(row[name] > 0 for row in rows for name in row if name.endswith("grad_norm"))

    config = write_run(killed, **SETTINGS)
    _kill_after(6, config, killed)
    assert len(numbers_of(killed)) < len(rows)
    ended, said = ranks.run(2, run_here, str(config))[0]
    assert ended == "" and "resuming from" in said, said
    assert numbers_of(killed) == rows
    last = Path("run") / "checkpoints" / "best_step_2"
    ours, theirs = (tensors_of(str(folder / last)) for folder in (whole, killed))
    assert ours.keys() == theirs.keys() and any(key.startswith("judge.") for key in ours)
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)

    shutil.rmtree(killed)
    again, said = ranks.run(2, run_here, str(whole / "run.yaml"))[0]
    assert again == "" and numbers_of(whole) == rows  # nothing is left to do


def test_a_checkpoint_of_another_flow_is_refused(ranks: Ranks, tmp_path: Path) -> None:
    ended, said = ranks.run(
        1, run_here, str(write_run(tmp_path, trainer__save_freq=1, trainer__total_training_steps=1))
    )[0]
    assert ended == "", said
    config = str(tmp_path / "run.yaml")
    other = [f"trainer.flow={FLOW}:flow", "warmup.total_training_steps=2", "warmup.train_batch_size=20"]
    ended, _ = ranks.run(1, run_here, config, other)[0]
    assert "with another" in ended and 'flow (trainer.flow "ppo" ->' in ended
    allowed = [*other, "trainer.resume_allow=[flow,warmup]"]
    ended, _ = ranks.run(1, run_here, config, allowed)[0]
    assert ended.startswith("RunRefused: ") and "was written in the loop 'rl', where this flow has 'judge'" in ended


FLOWS = {
    "no name": ("for _ in run.steps('Warm up', 1): pass", "'Warm up' is no name for a loop"),
    "twice": ("for _ in range(2): list(run.steps('a', 0))", "two loops of this flow are called 'a'"),
    "nested": ("for _ in run.steps('a', 1): list(run.steps('b', 1))", "the loop 'b' begins while 'a' is not over"),
    "no demonstrations": (
        "megarl.sft(run, None, 'sft', total=1, batch_size=2)",
        "the loop 'sft' takes 2 demonstrations a step, and no demonstrations are loaded: set warmup.train_files",
    ),
    "taken": ("run.add('identity', megarl.prompt_sampler(run.inputs))", "needs another name: this one is taken"),
}


def test_what_a_flow_may_not_do_is_said(ranks: Ranks, tmp_path: Path) -> None:
    config = str(write_run(tmp_path))
    for name, (body, wanted) in FLOWS.items():
        (tmp_path / "flow.py").write_text(f"import megarl\ndef flow(run):\n    {body}\n")
        run_dir = f"trainer.default_local_dir={tmp_path / name}"
        ended, _ = ranks.run(1, run_here, config, [f"trainer.flow={tmp_path / 'flow.py'}:flow", run_dir])[0]
        assert wanted in ended, (name, ended)


def test_a_stage_of_ones_own_in_ppo(ranks: Ranks, tmp_path: Path) -> None:
    """It sees what the step computed so far, and the step goes on with what it returns."""
    body = """
import megarl, torch
def flow(run):
    def stage(batch):
        assert batch.old_logp is not None and batch.advantages is None
        run.log("stage", {"reward": float(batch.rewards.mean())})
        return batch.with_(rewards=torch.ones(len(batch)))
    megarl.ppo(run, stage)
"""
    (tmp_path / "flow.py").write_text(body)
    settings = {"trainer__flow": f"{tmp_path / 'flow.py'}:flow", "trainer__total_training_steps": 1}
    ended, said = ranks.run(1, run_here, str(write_run(tmp_path, trainer__logger=["jsonl"], **settings)))[0]
    assert ended == "", said
    row = metrics_of(tmp_path)[-1]
    assert row["stage/reward"] == row["reward/mean"]
    assert row["actor/grad_norm"] == 0  # equal rewards: every advantage of the group is 0


def test_rollouts_of_ones_own_flow_are_shown(ranks: Ranks, tmp_path: Path) -> None:
    body = """
import megarl
def flow(run):
    optim = run.config.actor_rollout_ref.actor.optim
    actor = run.add("actor", megarl.build_actor(run.inputs, run.groups, optim=optim, total_steps=2))
    generation = run.generation(actor)
    for step in run.steps("mine", 2):
        with generation.phase():
            sampling = run.inputs.sampling(validation=False)
            rollouts = generation.rollouts(run.inputs.train_prompts[:2], 2, sampling, seed=1, round_=step)
        rollouts = run.score(rollouts)
        run.show(rollouts)
        batch = rollouts.to_batch()
        run.log("actor", actor.update(batch, *actor.plan(batch).mini_batches, megarl.cross_entropy))
        run.trained_on(batch.with_(advantages=batch.rewards[batch.sequence_of_token]))
"""
    (tmp_path / "flow.py").write_text(body)
    config = write_run(tmp_path, trainer__flow=f"{tmp_path / 'flow.py'}:flow", trainer__log_rollouts=4)
    ended, said = ranks.run(1, run_here, str(config))[0]
    assert ended == "", said
    for step in (1, 2):
        lines = (tmp_path / "run" / "rollouts" / f"step_{step:06d}.jsonl").read_text().splitlines()
        samples = [json.loads(line) for line in lines]
        assert len(samples) == 4
        assert all(sample["advantage"] == [sample["reward"]] * sample["length"] for sample in samples)


def test_a_loop_that_is_left_by_break(ranks: Ranks, tmp_path: Path) -> None:
    body = """
def flow(run):
    for step in run.steps("first", 3):
        run.log("a", {"b": step})
        if step == 2:
            break
    for step in run.steps("second", 1):
        run.log("a", {"b": 10 + step})
"""
    (tmp_path / "flow.py").write_text(body)
    config = write_run(tmp_path, trainer__flow=f"{tmp_path / 'flow.py'}:flow", trainer__logger=["jsonl"])
    ended, said = ranks.run(1, run_here, str(config))[0]
    assert ended == "", said
    assert [(row["step"], row["a/b"]) for row in metrics_of(tmp_path)] == [(1, 1.0), (4, 11.0)]


@pytest.mark.parametrize("name", ["policy", "reference"])
def test_an_engine_answers_for_a_model_of_any_name(ranks: Ranks, tmp_path: Path, name: str) -> None:
    """Its weights stay until the engine has them, whatever the table of phases says of the name."""
    body = f"""
def flow(run):
    roles = run.config.actor_rollout_ref
    actor = megarl.build_actor(run.inputs, run.groups, optim=roles.actor.optim, total_steps=2)
    run.add("{name}", actor)
    generation = run.generation(actor)
    for step in run.steps("rl", 2):
        chosen = run.inputs.train_prompts[:2]
        with generation.phase():
            made = generation.rollouts(chosen, 4, run.inputs.sampling(validation=False), seed=1, round_=step)
        batch = made.to_batch()
        run.log("actor", actor.update(batch, *actor.plan(batch).mini_batches, megarl.cross_entropy))
"""
    (tmp_path / "flow.py").write_text("import megarl\n" + body)
    config = write_run(
        tmp_path,
        trainer__flow=f"{tmp_path / 'flow.py'}:flow",
        trainer__logger=["jsonl"],
        actor_rollout_ref__actor__megatron={"param_offload": True, "optimizer_offload": True},
    )
    ended, said = ranks.run(1, run_here, str(config))[0]
    assert ended == "" and len(metrics_of(tmp_path)) == 2, said + ended


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP], ids=["asked", "closed-terminal"])
def test_a_signal_at_the_end_of_a_loop_loses_nothing(tmp_path: Path, number: signal.Signals) -> None:
    """It arrives in the loop's last step; the run leaves before the next one, and goes on there."""
    body = """
import os, signal, time
import megarl

def flow(run):
    for step in run.steps("first", 2):
        run.log("a", {"b": step})
        if step == 2 and not run.resumes:
            os.kill(os.getpid(), NUMBER)
            time.sleep(0.5)
    run.log("a", {"b": 7})
    for step in run.steps("second", 1):
        run.log("a", {"b": 10 + step})
"""
    (tmp_path / "flow.py").write_text(body.replace("NUMBER", f"{number:d}"))
    config = write_run(
        tmp_path, trainer__flow=f"{tmp_path / 'flow.py'}:flow", trainer__logger=["jsonl"], trainer__save_freq=-1
    )
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # which what started these tests may ignore
    left = megarl("train", str(config))
    signal.signal(signal.SIGHUP, before)
    assert left.returncode == 128 + number, left.stderr
    assert f"stopped by {number.name} after first step 2; checkpoint " in left.stderr, left.stderr
    done = megarl("train", str(config))
    assert done.returncode == 0, done.stderr
    assert [(row["step"], row["a/b"]) for row in metrics_of(tmp_path)] == [(1, 1.0), (2, 2.0), (3, 11.0)]


@pytest.mark.slow
def test_a_signal_between_two_loops_loses_nothing(tmp_path: Path) -> None:
    """What is between them is not in a checkpoint, so one is written after the next loop's first step."""
    body = """
import os, signal, time
import megarl

def flow(run):
    for step in run.steps("first", 2):
        run.log("a", {"b": step})
    if not run.resumes:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.5)
    for step in run.steps("second", 3):
        run.log("a", {"b": 10 + step})
"""
    (tmp_path / "flow.py").write_text(body)
    config = write_run(
        tmp_path, trainer__flow=f"{tmp_path / 'flow.py'}:flow", trainer__logger=["jsonl"], trainer__save_freq=-1
    )
    left = megarl("train", str(config))
    assert left.returncode == 128 + signal.SIGTERM, left.stderr
    assert "stopped by SIGTERM after second step 1; checkpoint " in left.stderr, left.stderr
    done = megarl("train", str(config))
    assert done.returncode == 0, done.stderr
    assert [row["a/b"] for row in metrics_of(tmp_path)] == [1.0, 2.0, 11.0, 12.0, 13.0]
