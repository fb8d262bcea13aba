"""Checks the keys that make a step: sampling, batch sizes, dynamic sampling, carried-over responses, optimizers."""

from __future__ import annotations

from megarl.algorithms.declaration import Needs
from megarl.config import Config
from megarl.config.reward import BY_MODEL
from megarl.flow_kinds import generates
from megarl.trainer.layouts import train_layout


def check_samples(config: Config) -> None:
    rollout = config.actor_rollout_ref.rollout
    sampling = rollout.val_kwargs
    if sampling.k and max(sampling.k) > sampling.n:
        raise ValueError(
            f"rollout.val_kwargs.k asks for {max(sampling.k)} samples per prompt, and rollout.val_kwargs.n = "
            f"{sampling.n} are drawn; raise n"
        )
    if sampling.n > 1 and sampling.temperature == 0:
        raise ValueError(
            f"rollout.val_kwargs.n = {sampling.n} greedy responses to a prompt are all the same; set "
            "rollout.val_kwargs.temperature, to 1 say"
        )


def check_optimization(config: Config) -> None:
    actor, used = config.actor_rollout_ref.actor, {"actor.optim": config.actor_rollout_ref.actor.optim}
    if generates(config):
        used |= {"critic.optim": config.critic.optim, "warmup.optim": config.warmup.optim}
    for section, optim in used.items():
        if optim.min_lr > optim.lr:
            raise ValueError(f"{section}.min_lr = {optim.min_lr:g} is more than {section}.lr = {optim.lr:g}")
    if not generates(config):
        return
    low, high = actor.clip_low, actor.clip_high
    if max(low, high) > 100 * min(low, high):
        raise ValueError(
            f"actor.clip_ratio_low = {low:g} and actor.clip_ratio_high = {high:g} are more than a factor of 100 apart; "
            "they are distances from a ratio of 1, such as 0.2 and 0.28"
        )
    control = config.algorithm.kl_ctrl
    if config.algorithm.use_kl_in_reward and control.type == "adaptive" and not control.kl_coef:
        raise ValueError(
            "algorithm.kl_ctrl.type=adaptive multiplies algorithm.kl_ctrl.kl_coef step by step, and 0 stays 0; begin "
            "with more, such as 0.001, or set type=fixed"
        )
    if actor.use_kl_loss and actor.kl_loss_type == "k1":
        raise ValueError(
            "actor.kl_loss_type=k1 regularises nothing: the expected gradient of a loss with k1 is zero on-policy; "
            "use k2, k3, or k1+, which has its value and the gradient of k2"
        )


def check_dynamic_sampling(config: Config) -> None:
    data, filtering, buffer = config.data, config.algorithm.filter_groups, config.reward.overlong_buffer
    if data.gen_batch_size is not None and not filtering.enable:
        raise ValueError(
            "data.gen_batch_size is the size of a draw with algorithm.filter_groups.enable=true; leave it off"
        )
    drawn = data.prompts_per_draw * filtering.max_num_gen_batches
    if filtering.enable and drawn < data.train_batch_size:
        raise ValueError(
            f"{filtering.max_num_gen_batches} draws of data.gen_batch_size = {data.gen_batch_size} prompts are fewer "
            f"than data.train_batch_size = {data.train_batch_size}; raise one of the two"
        )
    if config.environment.answers and BY_MODEL in config.reward.names and len(config.reward.names) > 1:
        raise ValueError(
            "reward.parts: of an episode functions read the end, a reward model all of it; have one of the two score"
        )
    if filtering.enable and config.reward.names == [BY_MODEL]:
        raise ValueError(
            "algorithm.filter_groups leaves out groups of equal scores, which a reward model does not give; "
            "set algorithm.filter_groups.enable=false"
        )
    if buffer.enable and not 0 < buffer.len < data.max_response_length:
        raise ValueError(
            f"reward.overlong_buffer.len = {buffer.len} must be between 1 and data.max_response_length - 1 = "
            f"{data.max_response_length - 1} tokens"
        )


def check_carry_over(config: Config) -> None:
    carry_over, prompts = config.actor_rollout_ref.rollout.carry_over, config.data.train_batch_size
    if not carry_over.enable:
        return
    if not prompts < config.groups_under_way <= 2 * prompts:
        raise ValueError(
            f"rollout.carry_over.groups = {carry_over.groups} must be more than data.train_batch_size = {prompts} and "
            "at most twice as many: the next step must be able to train on all that a step leaves"
        )
    if config.algorithm.filter_groups.enable:
        raise ValueError(
            "algorithm.filter_groups draws prompts until enough groups differ, rollout.carry_over goes on until enough "
            "are finished; use one of the two"
        )
    if not config.algorithm.rollout_correction.corrects:
        raise ValueError(
            "rollout.carry_over trains on tokens that older weights have drawn; set "
            "algorithm.rollout_correction.rollout_is=token, which weighs by it"
        )


def check_batches(config: Config, needs: Needs) -> None:
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    prompts, mini = config.data.train_batch_size, actor.ppo_mini_batch_size
    if prompts % mini:
        raise ValueError(f"data.train_batch_size = {prompts} is not a multiple of actor.ppo_mini_batch_size = {mini}")
    dp = train_layout(config).dp
    if mini * rollout.n % dp:
        raise ValueError(
            f"actor.ppo_mini_batch_size x rollout.n = {mini * rollout.n} sequences do not divide over {dp} "
            f"data-parallel ranks; make it a multiple of {dp}"
        )
    filtered = rollout.top_p < 1 or rollout.top_k > 0
    if filtered and config.algorithm.rollout_correction.rollout_is is None:
        raise ValueError(
            "rollout.top_p and rollout.top_k sample from another distribution than the training log-probabilities; "
            "set algorithm.rollout_correction.rollout_is=token, which weighs by it, or leave them off"
        )
    if rollout.n < needs.samples:
        name = config.algorithm.adv_estimator
        raise ValueError(
            f"rollout.n = {rollout.n} leaves nothing to compare within a group; use {needs.samples} or more with {name}"
        )
    if config.algorithm.filter_groups.enable and rollout.n == 1:
        raise ValueError("algorithm.filter_groups compares the responses to a prompt; set rollout.n to 2 or more")
    if config.trainer.critic_warmup and not needs.critic:
        raise ValueError(
            f"trainer.critic_warmup = {config.trainer.critic_warmup} trains only a critic, and "
            f"{config.algorithm.adv_estimator} has none; set it to 0"
        )
    if needs.critic and prompts % (size := config.critic_mini_batch_size):
        raise ValueError(f"data.train_batch_size = {prompts} is not a multiple of critic.ppo_mini_batch_size = {size}")
