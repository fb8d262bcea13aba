"""Defines the top-level configuration. Its sections are in the other modules of this package. Imports no torch.

Key names follow verl for the RL part and Megatron-Core for parallelism. All sections are frozen and keyword-only;
`megarl.config.load` refuses unknown keys.
"""

from __future__ import annotations

from typing import Any

from pydantic import model_validator

from megarl.config.algorithm import AlgorithmConfig
from megarl.config.data import DataConfig
from megarl.config.environment import EnvironmentConfig
from megarl.config.fields import Section
from megarl.config.other_models import CriticConfig, RewardModelConfig, TeacherConfig
from megarl.config.policy import ActorRolloutRefConfig
from megarl.config.profiler import ProfilerConfig
from megarl.config.reward import RewardConfig
from megarl.config.telemetry import TelemetryConfig
from megarl.config.trainer import CheckpointConfig, TrainerConfig, WarmupConfig


class Config(Section):
    """Holds the whole configuration of a run."""

    data: DataConfig = DataConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    actor_rollout_ref: ActorRolloutRefConfig = ActorRolloutRefConfig()
    critic: CriticConfig = CriticConfig()
    reward_model: RewardModelConfig = RewardModelConfig()
    teacher: TeacherConfig = TeacherConfig()
    reward: RewardConfig = RewardConfig()
    environment: EnvironmentConfig = EnvironmentConfig()
    warmup: WarmupConfig = WarmupConfig()
    trainer: TrainerConfig = TrainerConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    telemetry: TelemetryConfig = TelemetryConfig()
    profiler: ProfilerConfig = ProfilerConfig()

    @model_validator(mode="before")
    @classmethod
    def _as_the_actor(cls, values: Any) -> Any:
        """Fill in the actor's Megatron keys where another model does not set them."""
        if not isinstance(values, dict):
            return values
        actor = values.get("actor_rollout_ref") or {}
        megatron = (actor.get("actor") or {}).get("megatron") if isinstance(actor, dict) else None
        if not isinstance(megatron, dict):
            return values
        sections = {}
        for name in ("critic", "reward_model", "teacher"):
            section = values.get(name, {})
            if isinstance(section, dict) and isinstance(section.get("megatron", {}), dict):
                sections[name] = {**section, "megatron": {**megatron, **section.get("megatron", {})}}
        return {**values, **sections}

    @property
    def critic_mini_batch_size(self) -> int:
        """Count the prompts per optimizer step of the critic."""
        return self.critic.ppo_mini_batch_size or self.actor_rollout_ref.actor.ppo_mini_batch_size

    @property
    def groups_under_way(self) -> int:
        """Count the prompts whose responses are generated at the same time, with `rollout.carry_over`."""
        return self.actor_rollout_ref.rollout.carry_over.groups or 2 * self.data.train_batch_size

    @property
    def needs_reference(self) -> bool:
        """Tell whether keys require a reference model. An algorithm may require one, too."""
        return self.algorithm.use_kl_in_reward or self.actor_rollout_ref.actor.use_kl_loss
