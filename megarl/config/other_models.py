"""The other models of a run: critic, reward model, teacher."""

from __future__ import annotations

from pydantic import Field

from megarl.config.fields import LossAggMode, Section, Size
from megarl.config.policy import BatchingConfig, MegatronConfig, OptimConfig


class OtherModelConfig(Section):
    """The weights of a model beside the policy."""

    path: str = Field("", description="directory with a Hugging Face config.json and safetensors files")
    tokenizer_path: str = Field("", description="tokenizer directory or SentencePiece .model file; default: path")
    random_init: bool = Field(False, description="start from random weights instead of those in path")


class CriticOptimConfig(OptimConfig):
    """The same, with a default of its own."""

    lr: float = Field(1e-5, gt=0, le=1, description="peak learning rate")


class CriticConfig(BatchingConfig):
    """The model that predicts returns, for an estimator that needs values. Of its Megatron keys those that are not set
    are the actor's."""

    model: OtherModelConfig = Field(
        OtherModelConfig(),
        description="path: a language model, or one with a single label; default: as the policy begins",
    )
    optim: CriticOptimConfig = CriticOptimConfig()
    ppo_mini_batch_size: Size | None = Field(None, ge=1, description="prompts per optimizer step; default the actor's")
    ppo_epochs: Size = Field(1, ge=1, description="passes over each batch of rollouts")
    cliprange_value: float | None = Field(0.5, gt=0, description="values move no further in a step; null: any distance")
    loss_agg_mode: LossAggMode = Field("token-mean", description="how token losses become one number")
    lam: float | None = Field(None, ge=0, le=1, description="decay of its returns; default algorithm.lam")
    megatron: MegatronConfig = MegatronConfig()


class RewardModelConfig(BatchingConfig):
    """A model that scores responses, for reward.name=model. Of its Megatron keys those that are not set are the
    actor's."""

    model: OtherModelConfig = Field(OtherModelConfig(), description="path: a sequence classifier with one label")
    megatron: MegatronConfig = MegatronConfig()


class TeacherConfig(BatchingConfig):
    """A frozen language model with the policy's vocabulary, for an estimator that needs one. Of its Megatron keys those
    that are not set are the actor's."""

    model: OtherModelConfig = OtherModelConfig()
    megatron: MegatronConfig = MegatronConfig()
