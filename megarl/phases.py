"""Names the phases of a step, and the memory of models. Torch-free."""

from __future__ import annotations

from collections.abc import Collection
from enum import Enum


class Phase(str, Enum):
    """Names a part of a step: it is timed, its peak memory is measured, and both are predicted.

    A flow may have phases of its own beside these, with names of its own.
    """

    OFFLOAD = "offload"
    RESHARD = "reshard"
    GENERATE = "generate"
    REWARD = "reward"
    LOG_PROBS = "log_probs"
    REF = "ref"
    TEACHER = "teacher"
    VALUES = "values"
    UPDATE_CRITIC = "update_critic"
    UPDATE = "update"
    VALIDATE = "validate"
    SAVE = "save"

    def __str__(self) -> str:
        return self.value


def in_order(phases: Collection[str]) -> list[str]:
    """Put phases into the order of a step; those of a flow's own come last."""
    return [*(phase for phase in Phase if phase in phases), *(phase for phase in phases if phase not in [*Phase])]


class Item(str, Enum):
    """Names the memory of a model in the training layout."""

    WEIGHTS = "weights"
    GRADIENTS = "gradients"
    OPTIMIZER = "optimizer state"

    def __str__(self) -> str:
        return self.value
