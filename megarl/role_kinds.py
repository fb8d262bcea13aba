"""Describes the roles that models have in a run, as the rest of the program knows them. Torch-free.

A run moves memory by one table (`megarl.hybrid.residency`), and the prediction counts by it (`megarl.estimate`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from megarl.phases import Item, Phase

GENERATION = frozenset[str]({Phase.OFFLOAD, Phase.RESHARD, Phase.GENERATE})
"""Phases of the engine."""
_CRITIC = frozenset[str]({Phase.VALUES, Phase.UPDATE_CRITIC})
_FORWARD = frozenset[str]({Phase.LOG_PROBS, Phase.REF, Phase.TEACHER})
_ALL = frozenset[str](Phase)


def _in_generation() -> Mapping[Item, frozenset[str]]:
    return dict.fromkeys(Item, GENERATION)


@dataclass(frozen=True, kw_only=True)
class RoleKind:
    """Holds the facts of a role that residency, prediction and checks read. A user's class has its own: `kind`.

    Attributes:
        name: of the configuration's section, where it has one.
        scalar: whether its model ends in a value or a score in place of a vocabulary.
        from_actor: whether it begins with the actor's weights where its section names no folder.
        own_tokenizer: whether it may read texts in the tokens of a tokenizer of its own.
        forward: the phase of its forward pass, where that is one of its own; of a user's flow, any name.
        update: the phase of its optimizer's steps; None: it is not trained.
        replays_routing: whether its tokens go to the experts that the engine chose, where these are recorded.
        absent: memory -> the phases in which it is not on the GPU, if the configuration lets it leave at all. By
            default all of it leaves during generation.
    """

    name: str = ""
    scalar: bool = False
    from_actor: bool = False
    own_tokenizer: bool = False
    forward: str | None = None
    update: str | None = None
    replays_routing: bool = False
    absent: Mapping[Item, frozenset[str]] = field(default_factory=_in_generation)

    def without(self, item: Item) -> frozenset[str]:
        """Return the phases that do without this memory."""
        return self.absent.get(item, frozenset())


_OF_POLICY = {
    Item.WEIGHTS: frozenset[str]({Phase.GENERATE}),  # the reshard reads them
    Item.GRADIENTS: GENERATION | _FORWARD | _CRITIC | {Phase.SAVE},
    Item.OPTIMIZER: GENERATION | _CRITIC,
}

ACTOR = RoleKind(name="actor", update=Phase.UPDATE, replays_routing=True, absent=_OF_POLICY)
TRAINED_REWARD_MODEL = RoleKind(name="reward_model", scalar=True, update=Phase.UPDATE, absent=_OF_POLICY)
CRITIC = RoleKind(
    name="critic",
    scalar=True,
    from_actor=True,
    forward=Phase.VALUES,
    update=Phase.UPDATE_CRITIC,
    absent={
        Item.WEIGHTS: _ALL - _CRITIC - {Phase.SAVE},
        Item.GRADIENTS: _ALL - {Phase.UPDATE_CRITIC},
        Item.OPTIMIZER: _ALL - {Phase.UPDATE_CRITIC, Phase.SAVE},
    },
)
REFERENCE = RoleKind(name="reference", absent={Item.WEIGHTS: GENERATION | {Phase.UPDATE} | _CRITIC})
REWARD_MODEL = RoleKind(
    name="reward_model",
    scalar=True,
    own_tokenizer=True,
    forward=Phase.REWARD,
    absent={Item.WEIGHTS: _ALL - {Phase.REWARD}},
)
TEACHER = RoleKind(name="teacher", forward=Phase.TEACHER, absent={Item.WEIGHTS: _ALL - {Phase.TEACHER}})

NAMES = tuple(role.name for role in (ACTOR, CRITIC, REFERENCE, REWARD_MODEL, TEACHER))
"""Names that the roles of a flow's own may not have."""
