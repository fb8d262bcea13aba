"""Names advantage estimators and losses, and loads them from a user's file."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from megarl.own_code import check_runs, torch_as_before
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


def build_loss(losses: Registry[Callable[[Any], Loss]], name: str, section: Any) -> Loss:
    """Build the loss that a key names.

    Args:
        section: of the configuration, which the named function takes.

    Raises:
        OwnCodeError: the function returned no loss.
    """
    with torch_as_before():
        loss = losses.load(name)(section)
    check_runs(loss, f"what {losses.key} = {name} returns")
    return loss
