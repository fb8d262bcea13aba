"""The reshard's plan, straightforwardly: every layer and every expert for itself, whatever it costs."""

from __future__ import annotations

from collections import defaultdict

from megarl.models.placements import Placement
from megarl.models.tensors import Box, intersect
from megarl.reshard.layouts import Layouts
from megarl.reshard.plan import Piece, Plan, choose_sources


def reference_plan(layouts: Layouts, rank: int) -> Plan:
    block = layouts.train.model_ranks(rank)
    holders: dict[str, dict[Box, dict[int, Placement]]] = {}
    for r in block:
        for held in layouts.held(r):
            holders.setdefault(held.tensor, {}).setdefault(held.box, {}).setdefault(r, held)
    wanted: dict[int, dict[str, list[Placement]]] = {}
    for r in block:
        wanted[r] = defaultdict(list)
        for placement in layouts.wanted(layouts.generation.coords(r).tp):
            wanted[r][placement.tensor].append(placement)

    local: list[Piece] = []
    sends: dict[int, list[Piece]] = defaultdict(list)
    receives: dict[int, list[Piece]] = defaultdict(list)
    for tensor, boxes in holders.items():
        for turn, (box, held) in enumerate(boxes.items()):
            takers = [r for r in block if any(intersect(box, p.box) for p in wanted[r][tensor])]
            for taker, source in choose_sources(takers, held, turn).items():
                for placement in wanted[taker][tensor]:
                    part = intersect(box, placement.box)
                    if part is None or rank not in (taker, source):
                        continue
                    piece = Piece(
                        source_rank=source,
                        destination_rank=taker,
                        source=held[source],
                        destination=placement,
                        box=part,
                    )
                    if taker == source:
                        local.append(piece)
                    elif taker == rank:
                        receives[source].append(piece)
                    else:
                        sends[taker].append(piece)
    return Plan(
        local=tuple(local),
        sends={peer: tuple(sends[peer]) for peer in sorted(sends)},
        receives={peer: tuple(receives[peer]) for peer in sorted(receives)},
    )
