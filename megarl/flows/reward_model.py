"""Trains a reward model on pairs of answers."""

from __future__ import annotations

from megarl.algorithms.bradley_terry import BradleyTerry
from megarl.flows.learn import learn
from megarl.trainer.build import build_reward_model
from megarl.trainer.session.run import Run


def flow(run: Run) -> None:
    """Train the model of `actor_rollout_ref`, with a score in place of its vocabulary, on pairs of answers."""
    optim, total = run.config.actor_rollout_ref.actor.optim, run.inputs.total_steps
    scorer = build_reward_model(run.inputs, run.groups, optim=optim, total_steps=total, empty=run.resumes)
    learn(run, run.add("reward_model", scorer), BradleyTerry())
