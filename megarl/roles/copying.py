"""One model's weights into another of the same ranks, whose layout may be another."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.models.fill import local_view
from megarl.models.placements import Placement
from megarl.models.tensors import Box, logical_tensors

if TYPE_CHECKING:
    from megarl.roles.model import MegatronModel


@torch.no_grad()
def copy_weights(source: MegatronModel, target: MegatronModel) -> None:
    """Every tensor that both have; one that the source lacks stays as it is. Every rank calls it.

    One tensor after the other is put together on the host of every rank.
    """
    theirs, ours = logical_tensors(source.arch), logical_tensors(target.arch)
    held, wanted = _by_tensor(source), _by_tensor(target)
    read, written = source.parameters(), target.parameters()
    for name, tensor in theirs.items():
        if name not in ours:
            continue
        whole = torch.full(tensor.shape, -torch.inf)  # float32 holds every type of weight exactly
        for place in held[name]:
            _part(whole, place.box).copy_(local_view(read[place.param], place))
        # ranks that hold the same part hold the same values
        dist.all_reduce(whole, dist.ReduceOp.MAX, group=source.groups.control)
        for place in wanted[name]:
            local_view(written[place.param], place).copy_(_part(whole, place.box))


def _by_tensor(model: MegatronModel) -> dict[str, list[Placement]]:
    found: dict[str, list[Placement]] = defaultdict(list)
    for place in model.placements():
        found[place.tensor].append(place)
    return found


def _part(whole: Tensor, box: Box) -> Tensor:
    return whole[tuple(slice(*ends) for ends in box)]
