"""A model that is only read: from its files at every start, and not in checkpoints."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from megarl.config.policy import BatchingConfig, MegatronConfig, ModelConfig
from megarl.models.architecture import Architecture
from megarl.models.heads import Head, ScalarHead
from megarl.parallel.offload import OnHost
from megarl.parallel.train_groups import TrainGroups
from megarl.phases import Item
from megarl.role_kinds import ACTOR, REWARD_MODEL, TEACHER
from megarl.roles.model import MegatronModel
from megarl.roles.passes import Passes
from megarl.types import Batch


class FrozenModel(MegatronModel):
    """With `param_offload` its weights wait in pinned host memory except in the phase that uses them.

    Their `requires_grad` stays on, as a reference's does: frozen weights take another matmul, with other bits.
    """

    def __init__(
        self,
        arch: Architecture,
        groups: TrainGroups,
        *,
        model: ModelConfig,
        megatron: MegatronConfig,
        batching: BatchingConfig,
        balance: bool = True,
        initial: Callable[[MegatronModel], None],
    ) -> None:
        """
        Args:
            initial: gives the model its weights.
        """
        super().__init__(arch, groups, model=model, megatron=megatron, batching=batching, balance=balance)
        if megatron.param_offload:
            self.memory[Item.WEIGHTS] = (OnHost(lambda: self.parameters().values(), constant=True),)
        initial(self)


class Policy(FrozenModel):
    """A language model that answers prompts, and is not trained."""

    kind = ACTOR


class Teacher(FrozenModel):
    """The language model that a policy is to become like."""

    kind = TEACHER

    def log_probs(self, batch: Batch, passes: Passes) -> Tensor:
        """See `Actor.log_probs`."""
        return self.forward(batch, passes)


class Judge(FrozenModel):
    """A reward model that has been trained."""

    kind = REWARD_MODEL

    def make_head(self) -> Head:
        return ScalarHead(per="sequence")

    def scores(self, batch: Batch, passes: Passes) -> Tensor:
        """See `RewardModel.scores`."""
        return self.forward(batch, passes)
