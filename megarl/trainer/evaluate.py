"""Validation on the held-out prompts."""

from __future__ import annotations

from megarl.hybrid.generation import Generation
from megarl.trainer.scoring import Score
from megarl.trainer.session import Run
from megarl.trainer.step_metrics import reward_metrics


def evaluate(run: Run, generation: Generation, judge: Score | None = None) -> dict[str, float]:
    """Mean score and accuracy of `rollout.val_kwargs.n` samples per held-out prompt.

    Args:
        judge: scores them; default: the run's reward function.

    Returns:
        val/reward, val/accuracy, val/failed, as `reward_metrics` has them, and what `score_metrics` says of parts and
        data sources.
    """
    inputs = run.inputs
    n, params = inputs.config.actor_rollout_ref.rollout.val_kwargs.n, inputs.sampling(validation=True)
    with generation.phase():
        rollouts = generation.rollouts(
            inputs.val_prompts, n, params, seed=inputs.config.data.seed, round_=0, on_finished=run.on_finished
        )
    metrics = reward_metrics((judge or run.score)(rollouts))
    details = {f"val/{name}": value for name, value in run.score_metrics().items() if not name.startswith("latency_")}
    return {
        "val/reward": metrics["mean"],
        "val/accuracy": metrics["accuracy"],
        "val/failed": metrics["failed"],
        **details,
    }
