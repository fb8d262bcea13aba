"""The frozen policy that the KL is measured against."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megarl.parallel.offload import OnHost
from megarl.roles.actor import Actor
from megarl.roles.policy import Policy
from megarl.types import Batch


class Reference(Policy):
    """A copy of the actor's weights as they are when it is made, in the same layout. It never gets gradients."""

    def __init__(self, actor: Actor) -> None:
        super().__init__(actor.config, actor.arch, actor.groups)
        actor.gather_parameters()
        theirs = actor.parameters()
        with torch.no_grad():
            for name, parameter in self.parameters().items():
                # requires_grad stays on: for frozen weights Megatron-Core takes another matmul, with other bits, and
                # the KL of equal models would not be 0
                parameter.copy_(theirs[name])
        if self.config.ref.megatron.param_offload:
            self.weights = OnHost(lambda: self.parameters().values())

    def log_probs(self, batch: Batch, micro_batches: Sequence[Sequence[int]], temperature: float) -> Tensor:
        """See `Policy.log_probs`; afterwards the weights' memory is given back."""
        logp = super().log_probs(batch, micro_batches, temperature)
        self.weights.release(changed=False)
        return logp
