"""Counts what a reshard moves, without listing its pieces. Torch-free: for layouts that are only being considered."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Container
from dataclasses import dataclass

from megarl.models.tensors import volume
from megarl.reshard.plan import plan_once
from megarl.reshard.repeat import repetitions
from megarl.reshard.sides import Side


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Counts the elements that one rank moves in one reshard.

    Attributes:
        local: copied within the rank.
        shared: neither copied nor held twice, since the engine reads the training parameters.
        sent, received: by the other rank, to and from which.
    """

    local: int
    shared: int
    sent: Counter[int]
    received: Counter[int]


def reshard_traffic(
    source: Side, target: Side, rank: int, *, ranks_per_node: int = sys.maxsize, places: Container[str] = ()
) -> Traffic:
    """Count the elements of the pieces of `plan_reshard`.

    Args:
        places: names of engine parameters that are training parameters (`plan_shared` of the first layers).
    """
    times = repetitions(source.arch, source.runs, target.runs)
    local, shared, sent, received = 0, 0, Counter[int](), Counter[int]()
    for step in plan_once(source, target, rank, ranks_per_node):
        for piece in (*step.pieces, *step.relayed):
            elements = times.of(step.tensor) * volume(piece.box)
            if piece.destination_rank == rank and piece.destination.param in places:
                shared += elements
            elif piece.source_rank == piece.destination_rank:
                local += elements
            elif piece.destination_rank == rank:
                received[piece.source_rank] += elements
            else:
                sent[piece.destination_rank] += elements
    return Traffic(local=local, shared=shared, sent=sent, received=received)
