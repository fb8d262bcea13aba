"""Validation on the held-out prompts."""

from __future__ import annotations

from functools import partial

from megarl.hybrid.generation import Generation
from megarl.trainer.episodes import score_episodes
from megarl.trainer.scoring import Score
from megarl.trainer.session import Run
from megarl.trainer.step_metrics import episode_metrics, reward_metrics
from megarl.types import Rollouts


def evaluate(run: Run, generation: Generation, judge: Score | None = None) -> dict[str, float]:
    """Mean score and accuracy of `rollout.val_kwargs.n` samples per held-out prompt.

    Args:
        judge: scores them; default: the run's reward function.

    Returns:
        val/reward, val/accuracy, val/failed, as `reward_metrics` has them, and what `score_metrics` says of parts and
        data sources; of episodes val/turns, their mean.
    """
    inputs = run.inputs
    n, params = inputs.config.actor_rollout_ref.rollout.val_kwargs.n, inputs.sampling(validation=True)
    with generation.phase():
        rollouts = generation.rollouts(
            inputs.val_prompts, n, params, seed=inputs.config.data.seed, round_=0, on_finished=run.on_finished
        )
    judged = (judge or partial(_score, run))(rollouts)
    metrics, episodes = reward_metrics(judged), episode_metrics(judged)
    details = {f"val/{name}": value for name, value in run.score_metrics().items() if not name.startswith("latency_")}
    return {
        "val/reward": metrics["mean"],
        "val/accuracy": metrics["accuracy"],
        "val/failed": metrics["failed"],
        **({"val/turns": episodes["turns_mean"]} if episodes else {}),
        **details,
    }


def _score(run: Run, rollouts: Rollouts) -> Rollouts:
    if not run.config.environment.answers:
        return run.score(rollouts)
    return score_episodes(rollouts, score=run.score, config=run.config, say=run.report.say)
