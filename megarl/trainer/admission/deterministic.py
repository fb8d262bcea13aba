"""Checks `trainer.deterministic`: kernels that add up in a fixed order. No Megatron."""

from __future__ import annotations

from megarl.config import Config
from megarl.flow_kinds import generates
from megarl.rollout.kinds import engine_kind


def check_deterministic(config: Config) -> None:
    """Raise ValueError if `trainer.deterministic` is set and a part of the run cannot repeat itself."""
    if not config.trainer.deterministic:
        return
    roles = config.actor_rollout_ref
    if generates(config) and not engine_kind(roles.rollout.name).repeats:
        raise ValueError(
            f"trainer.deterministic: the kernels of rollout.name = {roles.rollout.name} round as its batches fall; use "
            "rollout.name=native, or leave it out"
        )
    if generates(config) and config.environment.answers:
        raise ValueError(
            "trainer.deterministic: an environment answers by the clock, and batches round as they fall; leave "
            "environment.name out, or the other"
        )
    sections = {
        "actor": roles.actor.megatron,
        "critic": config.critic.megatron,
        "teacher": config.teacher.megatron,
        "reward_model": config.reward_model.megatron,
    }
    for section, megatron in sections.items():
        if megatron.override_transformer_config.get("deterministic_mode") is False:
            raise ValueError(
                f"trainer.deterministic: {section}.megatron.override_transformer_config.deterministic_mode=false takes "
                "it back; leave one of the two out"
            )
