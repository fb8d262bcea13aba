"""Validation on the held-out prompts."""

from __future__ import annotations

from functools import partial

from megarl.hybrid.generation import Generation
from megarl.trainer.episodes import score_episodes
from megarl.trainer.scoring import Score, score
from megarl.trainer.session import Run
from megarl.trainer.step_metrics import episode_metrics, reward_metrics
from megarl.types import Rollouts


def evaluate(run: Run, generation: Generation, judge: Score | None = None) -> dict[str, float]:
    """Mean score and accuracy of `rollout.val_kwargs.n` samples per held-out prompt.

    Args:
        judge: scores them; default: the run's reward function.

    Returns:
        val/reward, val/accuracy, val/failed, as `reward_metrics` has them; of episodes val/turns, their mean.
    """
    inputs = run.inputs
    n, params = inputs.config.actor_rollout_ref.rollout.val_kwargs.n, inputs.sampling(validation=True)
    with generation.phase():
        rollouts = generation.rollouts(inputs.val_prompts, n, params, seed=inputs.config.data.seed, round_=0)
    judged = judge(rollouts) if judge else _scored(run, rollouts)
    metrics = reward_metrics(judged)
    named = {"val/reward": metrics["mean"], "val/accuracy": metrics["accuracy"], "val/failed": metrics["failed"]}
    return named | ({"val/turns": episodes["turns_mean"]} if (episodes := episode_metrics(judged)) else {})


def _scored(run: Run, rollouts: Rollouts) -> Rollouts:
    by_function = partial(score, inputs=run.inputs, groups=run.groups, say=run.report.say)
    if not run.config.environment.answers:
        return by_function(rollouts)
    return score_episodes(rollouts, score=by_function, config=run.config, say=run.report.say)
