"""The model of the return that is still to come."""

from __future__ import annotations

from torch import Tensor

from megarl.models.heads import Head, ScalarHead
from megarl.role_kinds import CRITIC
from megarl.roles.passes import Passes
from megarl.roles.trained import TrainedModel
from megarl.types import Batch


class Critic(TrainedModel):
    """A transformer with a value head, trained."""

    kind = CRITIC

    def make_head(self) -> Head:
        return ScalarHead(per="token")

    def values(self, batch: Batch, passes: Passes) -> Tensor:
        """The value of the state before each trained token; float32 [T], 0 at prompt tokens, on every rank."""
        return self.forward(batch, passes)
