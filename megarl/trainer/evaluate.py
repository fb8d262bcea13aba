"""Validation on the held-out prompts."""

from __future__ import annotations

from collections.abc import Callable

from megarl.hybrid.engine import HybridEngine
from megarl.trainer.inputs import Inputs
from megarl.trainer.scoring import score
from megarl.trainer.step_metrics import reward_metrics


def evaluate(inputs: Inputs, hybrid: HybridEngine, say: Callable[[str], None]) -> dict[str, float]:
    """Mean score and accuracy of `rollout.val_kwargs.n` samples per held-out prompt.

    Args:
        say: shows a line for people, when responses could not be scored.

    Returns:
        val/reward, val/accuracy, val/failed, as `reward_metrics` has them.
    """
    n = inputs.config.actor_rollout_ref.rollout.val_kwargs.n
    with hybrid.generation() as engine:
        rollouts = engine.generate(
            inputs.val_prompts, n, inputs.sampling(validation=True), seed=inputs.config.data.seed, round_=0
        )
    metrics = reward_metrics(score(rollouts, inputs, hybrid.groups, say))
    return {"val/reward": metrics["mean"], "val/accuracy": metrics["accuracy"], "val/failed": metrics["failed"]}
