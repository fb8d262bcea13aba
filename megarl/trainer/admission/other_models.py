"""Checks the models beside the policy: their keys, their layouts and their files."""

from __future__ import annotations

from collections.abc import Callable

from megarl.algorithms.declaration import Needs
from megarl.checkpoint.huggingface_folder import check_weights, refuse_remote_code, weight_entries
from megarl.config import Config
from megarl.models.architecture import Architecture
from megarl.models.weights import SCORE
from megarl.trainer.layouts import (
    check_megatron,
    check_padding,
    check_router_losses,
    check_shared_prompts,
    train_layout,
)
from megarl.trainer.other_models import OtherRole, architecture_of, other_roles, own_tokenizer


def check_other_layouts(config: Config, policy: Architecture, needs: Needs) -> None:
    """Raise ValueError, with what to change, for a model whose keys or config.json do not fit, or that nothing uses."""
    used = {role.kind.name for role in other_roles(config, needs)}
    estimator = f"algorithm.adv_estimator = {config.algorithm.adv_estimator} needs none"
    others = {
        "critic": (config.critic.model, estimator),
        "teacher": (config.teacher.model, estimator),
        "reward_model": (
            config.reward_model.model,
            f"reward.name = {config.reward.name} scores; set reward.name=model",
        ),
    }
    for name, (model, why) in others.items():
        if model.path and name not in used:
            raise ValueError(f"{name}.model.path is set, but {why}")
    _check_each(config, needs, lambda role: _check_layout(role, config, policy))


def check_other_files(config: Config, policy: Architecture, needs: Needs) -> None:
    """Raise ValueError for a model whose folder does not fit its role: own code, no weights, another tokenizer."""
    _check_each(config, needs, lambda role: _check_files(role, config, policy))


def _check_each(config: Config, needs: Needs, check: Callable[[OtherRole], None]) -> None:
    for role in other_roles(config, needs):
        try:
            check(role)
        except ValueError as e:
            raise ValueError(f"{role.kind.name}: {str(e).removeprefix('actor_rollout_ref.')}") from e


def _check_layout(role: OtherRole, config: Config, policy: Architecture) -> None:
    settings, model, megatron = role.settings, role.settings.model, role.settings.megatron
    if not (model.path or model.random_init or role.kind.from_actor):
        raise ValueError(f"set {role.kind.name}.model.path to the folder of its weights")
    arch = architecture_of(model, policy)
    if not role.kind.own_tokenizer:
        _check_vocabulary(arch, policy)
    layout = train_layout(config, megatron)
    check_megatron(megatron)
    trained = role.kind.update is not None
    check_router_losses(role.kind.name, megatron, trains_experts=trained and arch.moe is not None)
    check_shared_prompts(role.kind.name, config.actor_rollout_ref.model, megatron, arch)
    check_padding(role.kind.name, config.actor_rollout_ref.model, layout)
    arch.check_training(layout, sequence_parallel=megatron.sequence_parallel)
    longest = config.data.max_sequence_length
    what = f"data.max_prompt_length + data.max_response_length = {longest}"
    if longest > arch.max_position_embeddings:
        raise ValueError(f"{what} is more than its {arch.max_position_embeddings} positions")
    if settings.use_dynamic_bsz and longest > settings.most_tokens(megatron):
        limit = f"{role.kind.name}.ppo_max_token_len_per_gpu = {settings.limit(megatron)}"
        raise ValueError(f"{what} is more than {limit}")


def _check_files(role: OtherRole, config: Config, policy: Architecture) -> None:
    model, arch = role.settings.model, architecture_of(role.settings.model, policy)
    if role.kind.own_tokenizer and own_tokenizer(config) is None:
        _check_vocabulary(arch, policy)
    if model.path:
        refuse_remote_code(model.folder)
        if not model.random_init:
            check_weights(model.folder, arch.with_scalar_output() if role.kind.scalar else arch)
            if role.kind.own_tokenizer and SCORE not in weight_entries(model.folder):
                raise ValueError(f"'{model.path}' has no {SCORE}: a model that scores everything 0 is no reward model")


def _check_vocabulary(arch: Architecture, policy: Architecture) -> None:
    if arch.vocab_size != policy.vocab_size:
        raise ValueError(
            f"its vocabulary has {arch.vocab_size} tokens, the policy's {policy.vocab_size}; it must read the same ones"
        )
