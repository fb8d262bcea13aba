"""The policy that is trained."""

from __future__ import annotations

from torch import Tensor

from megarl.role_kinds import ACTOR
from megarl.roles.passes import Passes
from megarl.roles.trained import TrainedModel
from megarl.types import Batch


class Actor(TrainedModel):
    """A language model that is trained."""

    kind = ACTOR

    def log_probs(self, batch: Batch, passes: Passes) -> Tensor:
        """Log-probability of every trained token at the batch's temperature; float32 [T], nats, on every rank.

        Args:
            passes: see `MegatronModel.forward`.
        """
        return self.forward(batch, passes)
