"""Plans which part of which parameter goes from which rank to which. Pure arithmetic over two sides, torch-free.

A rank takes all it needs from one copy of the source's model. If it belongs to a copy, that is the one: the load
spreads over the copies by construction, one process group carries it, and planning costs the same at any number of
copies. Ranks that hold nothing are dealt out to the copies evenly.

What several ranks of a node want from another node, because they have the same place in different replicas, each of
them takes an even share of, and passes it on to the others: it travels between the nodes once.

An example, TP2 x PP2 for training and TP2 for generation. Ranks 0 and 1 hold the first half of the layers, 2 and 3 the
second; in each half, the first of the two has the first half of every matrix's rows. Rank 0 generates as the first of
replica (0, 1), so it needs the first rows of all layers: those of the first half of the layers it has itself (a local
copy, or none where the engine reads the training parameter), those of the second half it receives from rank 2. Rank 2
generates as the first of replica (2, 3) and receives the first half of the layers from rank 0; 1 and 3 do likewise.

A copy and the ranks that it serves are a block. Every rank of a block walks the same pieces in the same order (tensor,
source box, destination placement) and keeps those it takes part in. So sender and receiver agree on the order of their
pieces without talking.

Layers are alike, and so are experts: the first layer of each model chunk and the first expert of each part are planned,
and the others follow (`megarl.reshard.repeat`).
"""

from __future__ import annotations

import gc
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, NamedTuple

from megarl.models.placements import Placement
from megarl.models.tensors import Box, even_share, intersect, relative, volume
from megarl.reshard.repeat import RepeatedPlacement, Repetitions, expert_of, layer_of, repetitions
from megarl.reshard.sides import Side, copies_of_ranks

Pieces = tuple["Piece", ...]
"""In the order in which they travel."""

Transform = Callable[[Any], Any]
"""Computes what a piece becomes on its way, on the rank that holds it: tensor -> tensor of the same shape."""

Holders = dict[str, dict[Box, dict[int, Placement]]]
"""Logical tensor -> distinct source box -> rank that holds it -> where."""


class Piece(NamedTuple):
    """Is a box of a logical tensor that one rank reads and one rank writes.

    Attributes:
        source_rank, destination_rank: global ranks; equal for a copy within a rank.
        source: where the source rank holds a box that contains the piece.
        destination: where the destination rank needs a box that contains the piece.
        box: the piece, in coordinates of the logical tensor.
        transform: None: its bits are copied.
    """

    source_rank: int
    destination_rank: int
    source: Placement
    destination: Placement
    box: Box
    transform: Transform | None = None

    @property
    def tensor(self) -> str:
        """Return the name of the logical tensor."""
        return self.destination.tensor

    @property
    def source_part(self) -> Box:
        """Return the piece in coordinates of the source placement's box."""
        return relative(self.box, self.source.box)

    @property
    def destination_part(self) -> Box:
        """Return the piece in coordinates of the destination placement's box."""
        return relative(self.box, self.destination.box)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Lists one rank's part of a reshard.

    Attributes:
        local: pieces the rank copies within itself.
        sends: pieces by destination rank, in the order in which that rank expects them.
        receives: pieces by source rank, in the order in which that rank sends them.
        relay_sends, relay_receives: what is then passed on between ranks of a node, out of engine parameters into the
            same ones; likewise.
    """

    local: tuple[Piece, ...]
    sends: dict[int, tuple[Piece, ...]]
    receives: dict[int, tuple[Piece, ...]]
    relay_sends: dict[int, tuple[Piece, ...]]
    relay_receives: dict[int, tuple[Piece, ...]]

    def without(self, shared: Container[str]) -> Plan:
        """Leave out these engine parameters, which are training parameters of the rank itself."""
        return replace(self, local=tuple(p for p in self.local if p.destination.param not in shared))

    def transformed(self, transform_of: Callable[[Piece], Transform | None]) -> Plan:
        """Give each piece its transform. What ranks pass on to each other is transformed already."""

        def with_transforms(pieces: Pieces) -> Pieces:
            return tuple(piece._replace(transform=transform_of(piece)) for piece in pieces)

        sends, receives = (
            {peer: with_transforms(pieces) for peer, pieces in side.items()} for side in (self.sends, self.receives)
        )
        return replace(self, local=with_transforms(self.local), sends=sends, receives=receives)


def plan_reshard(source: Side, target: Side, rank: int, *, ranks_per_node: int = sys.maxsize) -> Plan:
    """Plan what `rank` copies, sends and receives so that the target's parameters hold the source's weights.

    Args:
        rank: of either side, or of both.
        ranks_per_node: consecutive ranks that share a node; by default all do.
    """
    with _garbage_collection_paused():
        times = repetitions(source.arch, source.runs, target.runs)
        steps = plan_once(source, target, rank, ranks_per_node)
        local, sends, receives = _by_peer(_repeat(steps, times), rank)
        relayed = [replace(step, pieces=step.relayed) for step in steps if step.relayed]
        _, relay_sends, relay_receives = _by_peer(_repeat(relayed, times), rank)
    return Plan(local=local, sends=sends, receives=receives, relay_sends=relay_sends, relay_receives=relay_receives)


def _by_peer(pieces: Iterable[Piece], rank: int) -> tuple[Pieces, dict[int, Pieces], dict[int, Pieces]]:
    """Sort pieces: within the rank, sent by destination, received by source."""
    local: list[Piece] = []
    sends: defaultdict[int, list[Piece]] = defaultdict(list)
    receives: defaultdict[int, list[Piece]] = defaultdict(list)
    for piece in pieces:
        if piece.source_rank == piece.destination_rank:
            local.append(piece)
        elif piece.destination_rank == rank:
            receives[piece.source_rank].append(piece)
        else:
            sends[piece.destination_rank].append(piece)
    sent, received = ({peer: tuple(side[peer]) for peer in sorted(side)} for side in (sends, receives))
    return tuple(local), sent, received


@dataclass(frozen=True, kw_only=True)
class Step:
    """Lists the pieces of one tensor that a rank takes part in.

    Attributes:
        tensor: name of the logical tensor.
        first_holder: lowest rank of the copy that holds some of it.
        relayed: pieces that it passes on, or that are passed on to it.
    """

    tensor: str
    first_holder: int
    pieces: list[Piece]
    relayed: list[Piece]


def plan_once(source: Side, target: Side, rank: int, ranks_per_node: int) -> list[Step]:
    """Plan what belongs to no layer, the first of the layers that are alike, and in it the first of such experts.

    All other layers and experts are planned alike, so the time does not depend on their number.
    """
    block, times = _Block(source, target, rank, ranks_per_node), repetitions(source.arch, source.runs, target.runs)
    one_of_each = {place: taker for taker, place in block.place.items()}
    placements = {r: source.placements(r, layers=times.layers, experts=times.experts) for r in block.holders}
    tensors = _holders(placements)
    numbers = (expert_of(tensor) for tensor, boxes in tensors.items() if _is_contested(boxes, rank))
    contested = {expert for expert in numbers if expert is not None}
    needs = {}
    for place, taker in one_of_each.items():
        experts: Container[int] = times.experts if place == block.place.get(rank) else contested
        needs[place] = by_tensor(target.placements(taker, layers=times.layers, experts=experts))
    steps: list[Step] = []
    for tensor, boxes in tensors.items():
        pieces: list[Piece] = []
        relayed: list[Piece] = []
        for turn, (box, holders) in enumerate(boxes.items()):
            asking = block.asking(rank, holders)
            places = one_of_each if asking is block.place else {block.place[r] for r in asking}
            overlaps = {place: _overlaps(box, needs[place].get(tensor, ())) for place in places}
            common = {place: parts for place, parts in overlaps.items() if parts}
            for taker, giver, sharing in block.exchanges(rank, tuple(holders), frozenset(common), turn):
                for to, whole in common[block.place[taker]]:
                    part = even_share(whole, sharing.index(taker), len(sharing))
                    if part is None:
                        continue
                    if rank in (taker, giver):
                        pieces.append(Piece(giver, taker, holders[giver], to, part))
                    others = (mate for mate in sharing if mate != taker and rank in (taker, mate))
                    relayed += [Piece(taker, mate, to, to, part) for mate in others]
        if pieces or relayed:
            first_holder = min(r for holders in boxes.values() for r in holders)
            steps.append(Step(tensor=tensor, first_holder=first_holder, pieces=pieces, relayed=relayed))
    if rank in block.place:
        arriving = (p for s in steps for p in (*s.pieces, *s.relayed) if p.destination_rank == rank)
        _check_coverage(needs[block.place[rank]], arriving)
    return steps


class _Block:
    """Holds one copy of the source's model, and the target's ranks that it serves.

    Attributes:
        holders: ranks of the copy, ascending.
        place: of each rank that takes, ascending: see `Side.place`.
    """

    def __init__(self, source: Side, target: Side, rank: int, ranks_per_node: int) -> None:
        copies = copies_of_ranks(source, target)
        takers = sorted(r for ranks in target.copies for r in ranks)
        self.holders = source.copies[copies[rank]]
        self.place = {r: target.place(r) for r in takers if copies[r] == copies[rank]}
        self._node = {r: r // ranks_per_node for r in (*self.holders, *self.place)}
        together: defaultdict[object, list[int]] = defaultdict(list)
        for r, place in self.place.items():
            together[self._node[r], place].append(r)
        self._ranks_per_node = ranks_per_node
        self._exchanges: dict[object, list[tuple[int, int, tuple[int, ...]]]] = {}
        self._mates = {r: mates for mates in map(tuple, together.values()) for r in mates}

    def sharing(self, taker: int, giver: int) -> tuple[int, ...]:
        """List the ranks, `taker` among them, that each take a share of what a rank has for all of them."""
        return (taker,) if self._node[taker] == self._node[giver] else self._mates[taker]

    def exchanges(
        self, rank: int, holders: tuple[int, ...], places: frozenset[object], turn: int
    ) -> list[tuple[int, int, tuple[int, ...]]]:
        """List who takes some of a box from whom, and the ranks that share it, as far as `rank` takes part.

        Many tensors are held by the same ranks, and wanted by the same: what is chosen for one holds for all.

        Args:
            places: of the ranks that need some of the box.
            turn: see `choose_sources`.
        """
        key = rank, holders, places, turn
        if key not in self._exchanges:
            takers = [r for r in self.asking(rank, holders) if self.place[r] in places]
            sources = choose_sources(takers, frozenset(holders), turn, self._ranks_per_node)
            mates = self._mates.get(rank, ())  # nobody else shares with it
            mine = ((taker, giver) for taker, giver in sources.items() if giver == rank or taker in mates)
            exchanges = ((taker, giver, self.sharing(taker, giver)) for taker, giver in mine)
            self._exchanges[key] = [x for x in exchanges if rank == x[1] or rank in x[2]]
        return self._exchanges[key]

    def asking(self, rank: int, holders: Collection[int]) -> Collection[int]:
        """List the ranks whose pieces of a box `rank` must enumerate.

        If several ranks hold the box, or `rank` does, that is all of them. If one other rank alone holds it, only
        `rank` and the ranks that it shares its part with can matter; none, if it takes nothing.
        """
        if rank not in self.place and rank not in holders:
            return ()
        if rank in holders or len(holders) > 1:
            return self.place
        (holder,) = holders
        return self.sharing(rank, holder)


@contextmanager
def _garbage_collection_paused() -> Iterator[None]:
    """Pause the collector, which would walk all objects again and again, and take as long as the rest.

    A large model has 200,000 pieces.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _repeat(steps: Iterable[Step], times: Repetitions) -> Iterator[Piece]:
    """Repeat the pieces for all layers and experts, in the order in which the block's ranks list their placements."""

    def layer(step: Step) -> tuple[int, int | None]:
        return step.first_holder, layer_of(step.tensor)

    for (_, number), in_layer in groupby(steps, key=layer):
        parts = [
            _RepeatedPieces(
                [piece for step in part for piece in step.pieces], 1 if expert is None else times.experts[expert]
            )
            for expert, part in groupby(in_layer, key=lambda step: expert_of(step.tensor))
        ]
        for i in range(1 if number is None else times.layers[number]):
            for part in parts:
                yield from part.of_layer(i)


class _RepeatedPieces:
    """Holds the pieces of a layer, or of an expert of it, with the placements that they share."""

    def __init__(self, pieces: list[Piece], experts: int) -> None:
        self._experts = experts
        self._placements: list[RepeatedPlacement] = []
        index: dict[Placement, int] = {}
        for placement in (p for piece in pieces for p in (piece.source, piece.destination)):
            if index.setdefault(placement, len(index)) == len(self._placements):
                self._placements.append(RepeatedPlacement(placement))
        self._pieces = [
            (p.source_rank, p.destination_rank, index[p.source], index[p.destination], p.box) for p in pieces
        ]

    def of_layer(self, layer: int) -> Iterator[Piece]:
        for expert in range(self._experts):
            at = [placement.at(layer, expert) for placement in self._placements]
            for source, taker, read, write, box in self._pieces:
                yield Piece(source, taker, at[read], at[write], box)


def choose_sources(
    takers: Sequence[int], holding: Collection[int], turn: int, ranks_per_node: int = sys.maxsize
) -> dict[int, int]:
    """Choose for every rank that takes part of a box the rank it takes it from: itself if it can, else a holder of its
    own node, else of another, in turn.

    Args:
        takers: ranks that need some of the box, ascending.
        holding: ranks that hold all of the box.
        turn: number of the box within its tensor. Starting every box with the same holder would give that one the
            odd taker each time (the first pipeline stage, for tied embeddings).
        ranks_per_node: consecutive ranks that share a node.

    Returns:
        Source rank by taker. The numbers of ranks of a node that two of its holders serve besides themselves differ by
        at most one, and so do the numbers of those that any two holders serve of nodes without one.
    """
    holders = sorted(holding)
    near: defaultdict[int, list[int]] = defaultdict(list)
    for holder in holders:
        near[holder // ranks_per_node].append(holder)
    served: Counter[int | None] = Counter()
    chosen = {}
    for taker in takers:
        if taker in holding:
            chosen[taker] = taker
            continue
        node = taker // ranks_per_node
        candidates, turns = (near[node], node) if node in near else (holders, None)
        chosen[taker] = candidates[(turn + served[turns]) % len(candidates)]
        served[turns] += 1
    return chosen


def _is_contested(boxes: Mapping[Box, Collection[int]], rank: int) -> bool:
    """Say whether a rank must know what ranks of all places need of a tensor; of another it knows its own place's."""
    return any(len(holders) > 1 or rank in holders for holders in boxes.values())


def _holders(placements_of: Mapping[int, Iterable[Placement]]) -> Holders:
    """List every box of the source with the copy's ranks that hold it. Same order on every rank of the block."""
    tensors: Holders = {}
    for rank, placements in placements_of.items():
        for placement in placements:
            holders = tensors.setdefault(placement.tensor, {}).setdefault(placement.box, {})
            # with both ends of the model on a rank, tied embeddings are listed twice: read the embedding
            holders.setdefault(rank, placement)
    return tensors


def by_tensor(placements: Iterable[Placement]) -> Mapping[str, list[Placement]]:
    """Sort placements by logical tensor."""
    tensors: defaultdict[str, list[Placement]] = defaultdict(list)
    for placement in placements:
        tensors[placement.tensor].append(placement)
    return tensors


def _overlaps(box: Box, placements: Iterable[Placement]) -> list[tuple[Placement, Box]]:
    """List the placements that need some of `box`, each with that part."""
    parts = ((placement, intersect(box, placement.box)) for placement in placements)
    return [(placement, part) for placement, part in parts if part is not None]


def _check_coverage(needs: Mapping[str, list[Placement]], pieces: Iterable[Piece]) -> None:
    """Assert that every element that is needed comes exactly once.

    Two source boxes of a tensor are the same or disjoint, and of equal ones a single one is chosen; so the pieces of a
    placement are disjoint, and equal volumes are enough.
    """
    arriving: Counter[Placement] = Counter()
    for piece in pieces:
        arriving[piece.destination] += volume(piece.box)
    for placements in needs.values():
        for placement in placements:
            assert arriving[placement] == volume(placement.box), f"{placement} gets {arriving[placement]} elements"
