"""Collects the models and log-probabilities that a configuration's algorithm needs."""

from __future__ import annotations

from megarl.algorithms.declaration import Needs, about_of
from megarl.algorithms.registry import ESTIMATORS, LOSSES
from megarl.config import Config
from megarl.flow_kinds import generates, needs_of_answers, trains


def needs_of(config: Config) -> Needs:
    """Collect the needs of advantage estimator, policy loss and KL, or of the loss on the data's own answers.

    There are none where nothing is trained. Raises ValueError if one of them is unknown.
    """
    if not trains(config):
        return Needs()
    if not generates(config):
        return needs_of_answers(config)
    estimator = ESTIMATORS.load(config.algorithm.adv_estimator)
    loss = LOSSES.load(config.actor_rollout_ref.actor.policy_loss.loss_mode)
    of_keys = Needs(reference=config.needs_reference, old_logp=config.algorithm.use_kl_in_reward)
    return about_of(estimator).needs | about_of(loss).needs | of_keys


def one_forward_pass(config: Config, needs: Needs) -> bool:
    """Tell whether the log-probabilities before the update are those of the update's own forward pass.

    With one optimizer step per batch the policy is still the one that they are of, so that every ratio is 1. Something
    that wants them sooner needs a pass of its own.
    """
    actor, correction = config.actor_rollout_ref.actor, config.algorithm.rollout_correction
    one_step = config.data.train_batch_size == actor.ppo_mini_batch_size and actor.ppo_epochs == 1
    return actor.fused_old_log_probs and one_step and not needs.old_logp and not correction.corrects
