"""A model that scores responses."""

from __future__ import annotations

from torch import Tensor

from megarl.models.heads import Head, ScalarHead
from megarl.role_kinds import TRAINED_REWARD_MODEL
from megarl.roles.passes import Passes
from megarl.roles.trained import TrainedModel
from megarl.types import Batch


class RewardModel(TrainedModel):
    """A transformer with a score head, trained."""

    kind = TRAINED_REWARD_MODEL

    def make_head(self) -> Head:
        return ScalarHead(per="sequence")

    def scores(self, batch: Batch, passes: Passes) -> Tensor:
        """The score of each sequence, read at its last token; float32 [N], on every rank."""
        return self.forward(batch, passes)
