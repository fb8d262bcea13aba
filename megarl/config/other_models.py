"""Defines the sections of the models beside the policy: critic, reward model, teacher."""

from __future__ import annotations

from pydantic import Field

from megarl.config.fields import LossAggMode, ModelFiles, Size
from megarl.config.policy import BatchingConfig, FastOptimConfig, MegatronConfig


class OtherModelConfig(ModelFiles):
    """Names the weights of a critic, reward model or teacher."""

    random_init: bool = Field(False, description="start from random weights instead of those in path")


class CriticConfig(BatchingConfig):
    """Describes the model that predicts returns, for an estimator that needs values. Megatron keys that are not set
    have the actor's values."""

    model: OtherModelConfig = Field(
        OtherModelConfig(),
        description="path: a language model, or a classifier with one label; default: the policy's first weights",
    )
    optim: FastOptimConfig = FastOptimConfig()
    ppo_mini_batch_size: Size | None = Field(None, ge=1, description="prompts per optimizer step; default the actor's")
    ppo_epochs: Size = Field(1, ge=1, description="passes over each batch of rollouts")
    cliprange_value: float | None = Field(
        0.5, gt=0, description="clip range of a value's change in a step; null: no clip"
    )
    loss_agg_mode: LossAggMode = Field("token-mean", description="aggregation of token losses into one number")
    lam: float | None = Field(None, ge=0, le=1, description="GAE decay of the critic's returns; default algorithm.lam")
    megatron: MegatronConfig = MegatronConfig()


class RewardModelConfig(BatchingConfig):
    """Describes a model that scores responses, for reward.name=model. Megatron keys that are not set have the actor's
    values."""

    model: OtherModelConfig = Field(OtherModelConfig(), description="path: a sequence classifier with one label")
    megatron: MegatronConfig = MegatronConfig()


class TeacherConfig(BatchingConfig):
    """Describes a frozen language model with the policy's vocabulary, for an estimator that needs a teacher. Megatron
    keys that are not set have the actor's values."""

    model: OtherModelConfig = OtherModelConfig()
    megatron: MegatronConfig = MegatronConfig()
