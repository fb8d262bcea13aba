"""The frozen policy that the KL is measured against."""

from __future__ import annotations

import torch

from megarl.roles.actor import Actor
from megarl.roles.policy import Policy


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
