"""Validation on the held-out prompts."""

from __future__ import annotations

from megarl.hybrid.generation import Generation
from megarl.trainer.scoring import Score, score
from megarl.trainer.session import Run
from megarl.trainer.step_metrics import reward_metrics


def evaluate(run: Run, generation: Generation, judge: Score | None = None) -> dict[str, float]:
    """Mean score and accuracy of `rollout.val_kwargs.n` samples per held-out prompt.

    Args:
        judge: scores them; default: the run's reward function.

    Returns:
        val/reward, val/accuracy, val/failed, as `reward_metrics` has them.
    """
    inputs = run.inputs
    n, params = inputs.config.actor_rollout_ref.rollout.val_kwargs.n, inputs.sampling(validation=True)
    with generation.phase():
        rollouts = generation.rollouts(inputs.val_prompts, n, params, seed=inputs.config.data.seed, round_=0)
    judged = judge(rollouts) if judge else score(rollouts, inputs, run.groups, run.report.say)
    metrics = reward_metrics(judged)
    return {"val/reward": metrics["mean"], "val/accuracy": metrics["accuracy"], "val/failed": metrics["failed"]}
