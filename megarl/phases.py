"""The phases of a step, and the memory that each of them does without. Torch-free.

One table: a run moves memory by it (`megarl.hybrid.residency`), and the prediction counts by it (`megarl.estimate`).
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum


class Phase(str, Enum):
    """What a rank does at a time: what is timed, whose peak memory is measured, and what is predicted."""

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


class Item(str, Enum):
    """Memory of a model in the training layout."""

    WEIGHTS = "weights"
    GRADIENTS = "gradients"
    OPTIMIZER = "optimizer state"

    def __str__(self) -> str:
        return self.value


_GENERATION = frozenset({Phase.OFFLOAD, Phase.RESHARD, Phase.GENERATE})
_CRITIC = frozenset({Phase.VALUES, Phase.UPDATE_CRITIC})
_FORWARD = frozenset({Phase.LOG_PROBS, Phase.REF, Phase.TEACHER})
_ALL = frozenset(Phase)

AWAY: Mapping[str, Mapping[Item, frozenset[Phase]]] = {
    "actor": {
        Item.WEIGHTS: frozenset({Phase.GENERATE}),  # the reshard reads them
        Item.GRADIENTS: _GENERATION | _FORWARD | _CRITIC | {Phase.SAVE},
        Item.OPTIMIZER: _GENERATION | _CRITIC,
    },
    "critic": {
        Item.WEIGHTS: _ALL - _CRITIC - {Phase.SAVE},
        Item.GRADIENTS: _ALL - {Phase.UPDATE_CRITIC},
        Item.OPTIMIZER: _ALL - {Phase.UPDATE_CRITIC, Phase.SAVE},
    },
    "reference": {Item.WEIGHTS: _GENERATION | {Phase.UPDATE} | _CRITIC},
    "reward_model": {Item.WEIGHTS: _ALL - {Phase.REWARD}},
    "teacher": {Item.WEIGHTS: _ALL - {Phase.TEACHER}},
}
"""Role -> its memory -> the phases in which it is not on the GPU, if the configuration lets it leave at all."""

_OF_OTHERS: Mapping[Item, frozenset[Phase]] = dict.fromkeys(Item, _GENERATION)


def away(role: str, item: Item) -> frozenset[Phase]:
    """The phases that do without it; of a role that the table does not name, all of generation."""
    return AWAY.get(role, _OF_OTHERS).get(item, frozenset())
