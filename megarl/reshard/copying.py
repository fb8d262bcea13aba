"""Copies a model's weights into another model of the same ranks, whose layout and parameter names may differ."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megarl.models.placements import Placement
from megarl.models.tensors import volume
from megarl.models.weights import OUTPUT, SCORE, logical_tensors
from megarl.parallel.world import World
from megarl.reshard.plan import Piece, plan_reshard
from megarl.reshard.sides import Side
from megarl.reshard.views import view_of


@torch.no_grad()
def copy_weights(
    source: Side, read: Mapping[str, Tensor], target: Side, written: Mapping[str, Tensor], world: World
) -> None:
    """Copy every tensor that both models have; an output layer of another form stays as it is. Every rank calls it.

    Parts that a rank lacks are sent over the hosts in fp32, one tensor after the other.

    Args:
        read, written: this rank's parameters, by the names in the placements of the sides.
    """
    tensors = logical_tensors(source.arch)
    missing = logical_tensors(target.arch).keys() - tensors.keys()
    assert missing <= {OUTPUT, SCORE}, f"{sorted(missing)} would stay as they are"

    def common(rank: int, **only: Any) -> Iterator[Placement]:
        return (placement for placement in target.placements(rank, **only) if placement.tensor not in missing)

    def source_part(piece: Piece) -> Tensor:
        return view_of(read[piece.source.param], piece.source, piece.source_part).tensor()

    def target_part(piece: Piece) -> Tensor:
        return view_of(written[piece.destination.param], piece.destination, piece.destination_part).tensor()

    plan = plan_reshard(source, replace(target, placements=common), world.rank)
    for piece in plan.local:
        target_part(piece).copy_(source_part(piece))
    if not world.maximum(bool(plan.sends or plan.receives), "a copy of another model's weights"):
        return
    sends, receives = (_by_tensor(side) for side in (plan.sends, plan.receives))
    for name in tensors:
        parts = [
            torch.cat([torch.empty(0), *(source_part(p).reshape(-1).float().cpu() for p in sends[name, peer])])
            for peer in range(world.size)
        ]
        sizes = [sum(volume(piece.box) for piece in receives[name, peer]) for peer in range(world.size)]
        received = world.exchange(parts, sizes, "the weights of another model")
        for peer, content in enumerate(received):
            pieces = receives[name, peer]
            for piece, values in zip(pieces, content.split([volume(piece.box) for piece in pieces]), strict=True):
                part = target_part(piece)
                part.copy_(values.view(part.shape))


def _by_tensor(side: Mapping[int, tuple[Piece, ...]]) -> defaultdict[tuple[str, int], list[Piece]]:
    """Sort the pieces of all peers by tensor and peer."""
    tensors: defaultdict[tuple[str, int], list[Piece]] = defaultdict(list)
    for peer, pieces in side.items():
        for piece in pieces:
            tensors[piece.tensor, peer].append(piece)
    return tensors
