"""Holds models that are not trained: those that come from their files at every start, and the reference."""

from __future__ import annotations

from collections.abc import Callable

from megarl.config.policy import BatchingConfig, MegatronConfig, ModelConfig
from megarl.models.architecture import Architecture
from megarl.models.heads import Head, ScalarHead
from megarl.parallel.offload import OnHost
from megarl.parallel.train_groups import TrainGroups
from megarl.phases import Item
from megarl.role_kinds import ACTOR, REFERENCE, REWARD_MODEL, TEACHER
from megarl.roles.model import MegatronModel


class FrozenModel(MegatronModel):
    """Reads a model from its files at every start; it is in no checkpoint.

    With `param_offload` its weights wait in pinned host memory except in the phase that uses them.

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
            _wait_on_host(self)
        initial(self)


class Policy(FrozenModel):
    """Answers prompts with a frozen policy."""

    kind = ACTOR


class Teacher(FrozenModel):
    """Gives the log-probabilities that a policy is trained towards."""

    kind = TEACHER
    log_probs = FrozenModel.forward
    """See `Actor.log_probs`."""


class Judge(FrozenModel):
    """Scores responses as a reward model that has been trained."""

    kind = REWARD_MODEL
    scores = FrozenModel.forward
    """See `RewardModel.scores`."""

    def make_head(self) -> Head:
        return ScalarHead(per="sequence")


class Reference(MegatronModel):
    """Keeps a copy of a policy's weights as they are when it is made, in the same layout: the KL is measured to it.

    Their `requires_grad` stays on all the same: for frozen weights Megatron-Core takes another matmul, with other bits,
    and the KL of equal models would not be 0.
    """

    kind = REFERENCE
    log_probs = MegatronModel.forward
    """See `Actor.log_probs`."""

    def __init__(
        self, policy: MegatronModel, *, model: ModelConfig, megatron: MegatronConfig, param_offload: bool = False
    ) -> None:
        """
        Args:
            model, megatron: those of the policy.
            param_offload: the weights wait in pinned host memory except while they are used.
        """
        batching, balance = policy.batching, policy.balance
        super().__init__(policy.arch, policy.groups, model=model, megatron=megatron, batching=batching, balance=balance)
        self._policy = policy
        if param_offload:
            _wait_on_host(self)
        self.renew()

    def renew(self) -> None:
        """Copy the policy's weights as they are now."""
        self.copy_from(self._policy)


def _wait_on_host(model: MegatronModel) -> None:
    """Keep weights that do not change in pinned host memory, except while they are used."""
    model.memory[Item.WEIGHTS] = (OnHost(lambda: model.parameters().values(), constant=True),)
