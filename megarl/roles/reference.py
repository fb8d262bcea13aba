"""The frozen policy that the KL is measured against."""

from __future__ import annotations

from torch import Tensor

from megarl.config.policy import MegatronConfig, ModelConfig
from megarl.parallel.offload import OnHost
from megarl.phases import Item
from megarl.role_kinds import REFERENCE
from megarl.roles.model import MegatronModel
from megarl.roles.passes import Passes
from megarl.types import Batch


class Reference(MegatronModel):
    """A copy of a policy's weights as they are when it is made, in the same layout. It never gets gradients.

    Their `requires_grad` stays on all the same: for frozen weights Megatron-Core takes another matmul, with other bits,
    and the KL of equal models would not be 0.
    """

    kind = REFERENCE

    def __init__(
        self, policy: MegatronModel, *, model: ModelConfig, megatron: MegatronConfig, param_offload: bool = False
    ) -> None:
        """
        Args:
            model, megatron: those of the policy.
            param_offload: the weights wait in pinned host memory except while they are used.
        """
        super().__init__(
            policy.arch,
            policy.groups,
            model=model,
            megatron=megatron,
            batching=policy.batching,
            balance=policy.balance,
        )
        self._policy = policy
        if param_offload:
            self.memory[Item.WEIGHTS] = (OnHost(lambda: self.parameters().values(), constant=True),)
        self.renew()

    def renew(self) -> None:
        """Copy the policy's weights as they are now."""
        self.copy_from(self._policy)

    def log_probs(self, batch: Batch, passes: Passes) -> Tensor:
        """See `Actor.log_probs`."""
        return self.forward(batch, passes)
