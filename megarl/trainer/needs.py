"""What a configuration's algorithm makes a run compute."""

from __future__ import annotations

from megarl.algorithms.declaration import Needs, about_of
from megarl.algorithms.registry import ESTIMATORS, LOSSES
from megarl.config import Config
from megarl.data.formats import trains


def needs_of(config: Config) -> Needs:
    """Of the advantage estimator, the policy loss and the keys of the KL; raises ValueError if one is unknown.
    Nothing where nothing is trained."""
    if not trains(config):
        return Needs()
    estimator = ESTIMATORS.load(config.algorithm.adv_estimator)
    loss = LOSSES.load(config.actor_rollout_ref.actor.policy_loss.loss_mode)
    of_keys = Needs(reference=config.needs_reference, old_logp=config.algorithm.use_kl_in_reward)
    return about_of(estimator).needs | about_of(loss).needs | of_keys


def one_forward_pass(config: Config, needs: Needs) -> bool:
    """Whether the log-probabilities before the update are those of the update's own forward pass.

    With one optimizer step per batch the policy is still the one that they are of, so that every ratio is 1. Something
    that wants them sooner needs a pass of its own.
    """
    actor, correction = config.actor_rollout_ref.actor, config.algorithm.rollout_correction
    one_step = config.data.train_batch_size == actor.ppo_mini_batch_size and actor.ppo_epochs == 1
    return actor.fused_old_log_probs and one_step and not needs.old_logp and not correction.corrects
