"""The reshard's plan, straightforwardly: every layer and every expert for itself, whatever it costs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from megarl.models.placements import Placement
from megarl.models.tensors import Box, even_share, intersect
from megarl.reshard.plan import Piece, Plan, choose_sources
from megarl.reshard.sides import Side


@dataclass
class Exchange:
    local: list[Piece] = field(default_factory=list)
    sends: dict[int, list[Piece]] = field(default_factory=lambda: defaultdict(list))
    receives: dict[int, list[Piece]] = field(default_factory=lambda: defaultdict(list))


def reference_plans(source: Side, target: Side, block: Sequence[int], ranks_per_node: int) -> dict[int, Plan]:
    """The plan of every rank of a model-parallel block, which gives and takes."""
    holders: dict[str, dict[Box, dict[int, Placement]]] = {}
    for r in block:
        for held in source.placements(r):
            holders.setdefault(held.tensor, {}).setdefault(held.box, {}).setdefault(r, held)
    wanted: dict[int, dict[str, list[Placement]]] = {}
    for r in block:
        wanted[r] = defaultdict(list)
        for placement in target.placements(r):
            wanted[r][placement.tensor].append(placement)

    first: dict[int, Exchange] = defaultdict(Exchange)
    second: dict[int, Exchange] = defaultdict(Exchange)

    def add(
        exchanges: dict[int, Exchange], source: int, taker: int, read: Placement, write: Placement, box: Box
    ) -> None:
        piece = Piece(source_rank=source, destination_rank=taker, source=read, destination=write, box=box)
        if source == taker:
            exchanges[taker].local.append(piece)
        else:
            exchanges[taker].receives[source].append(piece)
            exchanges[source].sends[taker].append(piece)

    def replica_rank(r: int) -> tuple[int, object]:
        return r // ranks_per_node, target.place(r)

    for tensor, boxes in holders.items():
        for turn, (box, sources) in enumerate(boxes.items()):
            takers = [r for r in block if any(intersect(box, p.box) for p in wanted[r][tensor])]
            for taker, giver in choose_sources(takers, sources, turn, ranks_per_node).items():
                far = giver // ranks_per_node != taker // ranks_per_node
                mates = [r for r in block if replica_rank(r) == replica_rank(taker)] if far else [taker]
                for placement in wanted[taker][tensor]:
                    whole = intersect(box, placement.box)
                    part = whole and even_share(whole, mates.index(taker), len(mates))
                    if part is None:
                        continue
                    add(first, giver, taker, sources[giver], placement, part)
                    for mate in mates:
                        if mate != taker:
                            add(second, taker, mate, placement, placement, part)
    assert not any(exchange.local for exchange in second.values())
    return {
        r: Plan(
            local=tuple(first[r].local),
            sends=_in_order(first[r].sends),
            receives=_in_order(first[r].receives),
            relay_sends=_in_order(second[r].sends),
            relay_receives=_in_order(second[r].receives),
        )
        for r in block
    }


def _in_order(side: dict[int, list[Piece]]) -> dict[int, tuple[Piece, ...]]:
    return {peer: tuple(side[peer]) for peer in sorted(side)}
