"""Names of advantage estimators and policy losses, and loading one from a user's file."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from megarl.registry import Registry

if TYPE_CHECKING:
    from torch import Tensor

    from megarl.algorithms.loss import Loss
    from megarl.config.schema import Actor, Algorithm
    from megarl.types import Batch

ESTIMATORS: Registry[Callable[[Batch, Algorithm], Tensor]] = Registry(
    "algorithm.adv_estimator", "function", lazy={"grpo": "megarl.algorithms.grpo:grpo"}
)
"""What `algorithm.adv_estimator` can name: (batch, the section `algorithm`) -> advantages, float32 [T].

`Batch.rewards` are the scores, less the KL to the reference where that is in the reward. A sequence that was not scored
has no trained tokens. Advantages at tokens that are not trained are ignored.
"""

LOSSES: Registry[Callable[[Actor], Loss]] = Registry(
    "actor.policy_loss.loss_mode", "function", lazy={"vanilla": "megarl.algorithms.policy_loss:vanilla"}
)
"""What `actor.policy_loss.loss_mode` can name: the section `actor` -> the loss of a policy update."""
