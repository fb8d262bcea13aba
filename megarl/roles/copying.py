"""One model's weights into another of the same ranks, whose layout may be another."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megarl.models.fill import local_view
from megarl.models.placements import Placement
from megarl.models.tensors import OUTPUT, SCORE, Box, intersect, logical_tensors, relative, volume

if TYPE_CHECKING:
    from megarl.roles.model import MegatronModel

_OUTPUTS = {OUTPUT, SCORE}


@torch.no_grad()
def copy_weights(source: MegatronModel, target: MegatronModel) -> None:
    """Copy every tensor that both have; an output layer of another form stays as it is. Every rank calls it.

    In another layout each rank is sent what it wants of one tensor after the other, over the hosts.
    """
    theirs, ours = logical_tensors(source.arch), logical_tensors(target.arch)
    assert ours.keys() - theirs.keys() <= _OUTPUTS, f"{sorted(ours.keys() - theirs.keys())} would stay as they are"
    if source.groups.layout == target.groups.layout:
        copy_boxes(source.parameters(), source.placements(), target.parameters(), target.placements())
        return
    world = source.groups.layout.ranks
    held, wanted = ([_by_tensor(model.placements(rank)) for rank in world] for model in (source, target))
    read, written, rank = source.parameters(), target.parameters(), source.groups.world.rank
    for name in [name for name in theirs if name in ours]:
        moves = list(_moves([of[name] for of in held], [of[name] for of in wanted]))
        parts: list[list[Tensor]] = [[torch.empty(0)] for _ in world]
        sizes = [0 for _ in world]
        for move in moves:
            if move.giver == rank:
                parts[move.taker].append(_part(read, move.held, move.box).reshape(-1).float().cpu())
            if move.taker == rank:
                sizes[move.giver] += volume(move.box)
        given = [torch.cat(of) for of in parts]
        received = source.groups.world.exchange(given, sizes, "the weights of another model")
        for move in moves:
            if move.taker == rank:
                size = volume(move.box)
                content, received[move.giver] = received[move.giver][:size], received[move.giver][size:]
                part = _part(written, move.wanted, move.box)
                part.copy_(content.view(part.shape))


@torch.no_grad()
def copy_boxes(
    source: Mapping[str, Tensor], held: Iterable[Placement], target: Mapping[str, Tensor], wanted: Iterable[Placement]
) -> None:
    """Copy between two models of a rank in one layout, whatever their parameters are called: Transformer Engine's
    layers have other norms than Megatron-Core's own. What differs between the models is their output layer."""
    places = {(place.tensor, place.box): place for place in held}
    for place in wanted:
        there = places.get((place.tensor, place.box))
        if there is not None:
            local_view(target[place.param], place).copy_(local_view(source[there.param], there))
        else:
            assert place.tensor in _OUTPUTS, f"{place.tensor} would stay as it is"


@dataclass(frozen=True, kw_only=True)
class _Move:
    """A box that one rank gives another, or itself."""

    giver: int
    taker: int
    held: Placement
    wanted: Placement
    box: Box


def _moves(held: list[list[Placement]], wanted: list[list[Placement]]) -> Iterator[_Move]:
    """What brings each part of a tensor to those who want it, in the same order on every rank.

    Args:
        held, wanted: by rank.
    """
    holders: dict[Box, dict[int, Placement]] = defaultdict(dict)  # two boxes are the same or disjoint
    for rank, places in enumerate(held):
        for place in places:
            holders[place.box].setdefault(rank, place)
    for taker, places in enumerate(wanted):
        for place in places:
            for box, of_rank in holders.items():
                if (part := intersect(box, place.box)) is not None:
                    giver = taker if taker in of_rank else list(of_rank)[taker % len(of_rank)]
                    yield _Move(giver=giver, taker=taker, held=of_rank[giver], wanted=place, box=part)


def _by_tensor(placements: Iterable[Placement]) -> defaultdict[str, list[Placement]]:
    found: defaultdict[str, list[Placement]] = defaultdict(list)
    for place in placements:
        found[place.tensor].append(place)
    return found


def _part(parameters: Mapping[str, Tensor], place: Placement, box: Box) -> Tensor:
    return local_view(parameters[place.param], place)[tuple(slice(*ends) for ends in relative(box, place.box))]
