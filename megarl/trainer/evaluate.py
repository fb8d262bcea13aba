"""Validation on the held-out prompts."""

from __future__ import annotations

from megarl.hybrid.engine import HybridEngine
from megarl.trainer.inputs import Inputs
from megarl.trainer.scoring import score


def evaluate(inputs: Inputs, hybrid: HybridEngine) -> dict[str, float]:
    """Mean score and accuracy (share of scores of 1 or more) of `rollout.val_kwargs.n` samples per held-out prompt."""
    n = inputs.config.actor_rollout_ref.rollout.val_kwargs.n
    with hybrid.generation() as engine:
        rollouts = engine.generate(
            inputs.val_prompts, n, inputs.sampling(validation=True), seed=inputs.config.data.seed, round_=0
        )
    rewards = score(rollouts, inputs.reward, inputs.tokenizer, hybrid.groups).rewards
    return {
        "val/reward": sum(rewards) / len(rewards),
        "val/accuracy": sum(r >= 1.0 for r in rewards) / len(rewards),
    }
