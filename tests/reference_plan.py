"""The reshard's plan, straightforwardly: every layer and every expert for itself, whatever it costs."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from megarl.models.placements import Placement
from megarl.models.tensors import Box, even_share, intersect
from megarl.reshard.layouts import Layouts
from megarl.reshard.plan import Piece, Plan, choose_sources


@dataclass
class Exchange:
    local: list[Piece] = field(default_factory=list)
    sends: dict[int, list[Piece]] = field(default_factory=lambda: defaultdict(list))
    receives: dict[int, list[Piece]] = field(default_factory=lambda: defaultdict(list))


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

    exchanges = [Exchange(), Exchange()]

    def add(exchange: Exchange, piece: Piece) -> None:
        if piece.source_rank == piece.destination_rank == rank:
            exchange.local.append(piece)
        elif piece.destination_rank == rank:
            exchange.receives[piece.source_rank].append(piece)
        elif piece.source_rank == rank:
            exchange.sends[piece.destination_rank].append(piece)

    def piece(source: int, taker: int, read: Placement, write: Placement, box: Box) -> Piece:
        return Piece(source_rank=source, destination_rank=taker, source=read, destination=write, box=box)

    def replica_rank(r: int) -> tuple[int, int]:
        return r // layouts.ranks_per_node, layouts.generation.coords(r).tp

    for tensor, boxes in holders.items():
        for turn, (box, sources) in enumerate(boxes.items()):
            takers = [r for r in block if any(intersect(box, p.box) for p in wanted[r][tensor])]
            for taker, source in choose_sources(takers, sources, turn, layouts.ranks_per_node).items():
                far = source // layouts.ranks_per_node != taker // layouts.ranks_per_node
                mates = [r for r in block if replica_rank(r) == replica_rank(taker)] if far else [taker]
                for placement in wanted[taker][tensor]:
                    whole = intersect(box, placement.box)
                    part = whole and even_share(whole, mates.index(taker), len(mates))
                    if part is None:
                        continue
                    add(exchanges[0], piece(source, taker, sources[source], placement, part))
                    for mate in mates:
                        if mate != taker:
                            add(exchanges[1], piece(taker, mate, placement, placement, part))
    first, second = exchanges
    assert not second.local
    return Plan(
        local=tuple(first.local),
        sends=_in_order(first.sends),
        receives=_in_order(first.receives),
        relay_sends=_in_order(second.sends),
        relay_receives=_in_order(second.receives),
    )


def _in_order(side: dict[int, list[Piece]]) -> dict[int, tuple[Piece, ...]]:
    return {peer: tuple(side[peer]) for peer in sorted(side)}
