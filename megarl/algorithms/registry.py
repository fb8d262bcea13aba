"""Names advantage estimators and losses, and loads them from a user's file."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from megarl.registry import Registry

if TYPE_CHECKING:
    from torch import Tensor

    from megarl.algorithms.loss import Loss
    from megarl.config.algorithm import AlgorithmConfig, PreferenceConfig
    from megarl.config.policy import ActorConfig
    from megarl.types import Batch

ESTIMATORS: Registry[Callable[[Batch, AlgorithmConfig], Tensor]] = Registry(
    "algorithm.adv_estimator", "function", package="megarl.algorithms.estimators"
)

LOSSES: Registry[Callable[[ActorConfig], Loss]] = Registry(
    "actor.policy_loss.loss_mode", "function", package="megarl.algorithms.losses"
)

PREFERENCES: Registry[Callable[[PreferenceConfig], Loss]] = Registry(
    "algorithm.preference.loss_mode", "function", package="megarl.algorithms.preferences"
)
