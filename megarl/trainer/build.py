"""The roles and the loss that a configuration asks for."""

from __future__ import annotations

from megarl.algorithms.policy_loss import PolicyLoss
from megarl.checkpoint.import_huggingface import HuggingFaceWeights
from megarl.checkpoint.store import load_checkpoint
from megarl.config import Config
from megarl.models.weights import random_source
from megarl.parallel.groups import Groups
from megarl.roles.actor import Actor
from megarl.roles.policy import Policy
from megarl.trainer.inputs import Inputs


def build_actor(inputs: Inputs, groups: Groups, *, empty: bool) -> Actor:
    """The actor with its first weights.

    Args:
        empty: all zero instead, since the run goes on from a checkpoint, which has them all.
    """
    config = inputs.config
    model = config.actor_rollout_ref.model

    def initial(policy: Policy) -> None:
        if empty:
            return
        if model.checkpoint:
            state = load_checkpoint(model.checkpoint, policy.sharded_state(), rng=False, control=groups.control)
            policy.load_sharded(state)
        elif model.random_init:
            policy.load(random_source(inputs.arch, config.data.seed))
        else:
            policy.load(HuggingFaceWeights(model.path, inputs.arch).box)

    return Actor(config.actor_rollout_ref, inputs.arch, groups, initial=initial)


def policy_loss(config: Config) -> PolicyLoss:
    """The loss that the configuration asks for."""
    actor = config.actor_rollout_ref.actor
    return PolicyLoss(
        clip_low=actor.clip_low,
        clip_high=actor.clip_high,
        clip_c=actor.clip_ratio_c,
        entropy_coeff=actor.entropy_coeff,
        kl_coef=actor.kl_loss_coef if actor.use_kl_loss else 0.0,
        kl_type=actor.kl_loss_type,
    )
