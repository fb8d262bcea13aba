"""One model's weights into another of the same ranks, whose layout may be another."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megarl.models.fill import local_view
from megarl.models.placements import Placement
from megarl.models.tensors import OUTPUT, SCORE, Box, logical_tensors
from megarl.parallel.control import maximum_

if TYPE_CHECKING:
    from megarl.roles.model import MegatronModel

_OUTPUTS = {OUTPUT, SCORE}


@torch.no_grad()
def copy_weights(source: MegatronModel, target: MegatronModel) -> None:
    """Copy every tensor that both have; an output layer of another form stays as it is. Every rank calls it.

    In another layout one tensor after the other is put together on the host of every rank.
    """
    theirs, ours = logical_tensors(source.arch), logical_tensors(target.arch)
    assert ours.keys() - theirs.keys() <= _OUTPUTS, f"{sorted(ours.keys() - theirs.keys())} would stay as they are"
    if source.groups.train == target.groups.train:
        copy_boxes(source.parameters(), source.placements(), target.parameters(), target.placements())
        return
    held, wanted = _by_tensor(source), _by_tensor(target)
    read, written = source.parameters(), target.parameters()
    for name, tensor in theirs.items():
        if name not in ours:
            continue
        whole = torch.full(tensor.shape, -torch.inf)  # float32 holds every type of weight exactly
        for place in held[name]:
            _part(whole, place.box).copy_(local_view(read[place.param], place))
        # ranks that hold the same part hold the same values
        maximum_(source.groups.control, whole, "the weights of another model")
        for place in wanted[name]:
            local_view(written[place.param], place).copy_(_part(whole, place.box))


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


def _by_tensor(model: MegatronModel) -> dict[str, list[Placement]]:
    found: dict[str, list[Placement]] = defaultdict(list)
    for place in model.placements():
        found[place.tensor].append(place)
    return found


def _part(whole: Tensor, box: Box) -> Tensor:
    return whole[tuple(slice(*ends) for ends in box)]
