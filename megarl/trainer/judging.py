"""Scores by a reward model, or by the reward function: what a run's configuration asks for."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from megarl.rewards.registry import BY_MODEL
from megarl.roles.frozen import Judge
from megarl.trainer.build import build_judge
from megarl.trainer.scoring import Score, score
from megarl.trainer.session import Run
from megarl.types import Rollouts


def scorer(run: Run) -> Score:
    """How rollouts are scored; a reward model joins the run."""
    if run.config.reward.name != BY_MODEL:
        return partial(score, inputs=run.inputs, groups=run.groups, say=run.report.say)
    judge = run.add("reward_model", build_judge(run))
    return partial(score_by_model, run=run, judge=judge)


def score_by_model(rollouts: Rollouts, *, run: Run, judge: Judge) -> Rollouts:
    """The same rollouts with the model's scores of prompt and response, as `rewards`."""
    batch = replace(rollouts, rewards=()).to_batch()
    plan = run.plan(batch, model=judge, batching=run.config.reward_model)
    return replace(rollouts, rewards=tuple(judge.scores(batch, plan.micro_batches).tolist()))
