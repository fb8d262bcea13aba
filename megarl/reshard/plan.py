"""Which part of which parameter goes from which rank to which. Pure arithmetic over two layouts, torch-free.

A model-parallel block of the training layout (same dp and cp; every tp and pp) holds the whole model, so a rank takes
all it needs from its own block: the load spreads over the replicas by construction, one process group carries it, and
planning costs the same at any data-parallel size.

What several ranks of a node want from another node, because they have the same place in different replicas, each of
them takes an even share of, and passes it on to the others: it travels between the nodes once.

An example, TP2 x PP2 for training and TP2 for generation. Ranks 0 and 1 hold the first half of the layers, 2 and 3 the
second; in each half, the first of the two has the first half of every matrix's rows. Rank 0 generates as the first of
replica (0, 1), so it needs the first rows of all layers: those of the first half of the layers it has itself (a local
copy, or none where the engine reads the training parameter), those of the second half it receives from rank 2. Rank 2
generates as the first of replica (2, 3) and receives the first half of the layers from rank 0; 1 and 3 do likewise.

Every rank of a block walks the same pieces in the same order (tensor, source box, destination placement) and keeps
those it takes part in. So sender and receiver agree on the order of their pieces without talking.

Layers are alike, and so are experts: the first layer of each model chunk and the first expert are planned, and the
others are their copies (`megarl.reshard.repeat`).
"""

from __future__ import annotations

import gc
import sys
from collections import Counter, defaultdict
from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import groupby

from megarl.models.placements import Placement
from megarl.models.tensors import Box, even_share, intersect, relative, volume
from megarl.reshard.layouts import Layouts
from megarl.reshard.repeat import FIRST_EXPERT, RepeatedPlacement, Repetitions, layer_of, of_expert, repetitions

Pieces = tuple["Piece", ...]
"""In the order in which they travel."""

Holders = dict[str, dict[Box, dict[int, Placement]]]
"""Logical tensor -> distinct source box -> rank that holds it -> where."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """A box of a logical tensor that one rank reads and one rank writes.

    Attributes:
        source_rank, destination_rank: global ranks; equal for a copy within a rank.
        source: where the source rank holds a box that contains the piece.
        destination: where the destination rank wants a box that contains the piece.
        box: the piece, in coordinates of the logical tensor.
    """

    source_rank: int
    destination_rank: int
    source: Placement
    destination: Placement
    box: Box

    @property
    def tensor(self) -> str:
        """Name of the logical tensor."""
        return self.destination.tensor

    @property
    def source_part(self) -> Box:
        """The piece in coordinates of the source placement's box."""
        return relative(self.box, self.source.box)

    @property
    def destination_part(self) -> Box:
        """The piece in coordinates of the destination placement's box."""
        return relative(self.box, self.destination.box)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One rank's part of a reshard.

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
        """What is left to do when these engine parameters are training parameters of the rank itself."""
        return replace(self, local=tuple(p for p in self.local if p.destination.param not in shared))


def plan_reshard(layouts: Layouts, rank: int) -> Plan:
    """What `rank` copies, sends and receives so that its engine parameters hold the actor's weights.

    Args:
        rank: global rank; its peers are among `layouts.train.model_ranks(rank)`.
    """
    times = repetitions(layouts.arch, layouts.train)
    steps = plan_once(layouts, rank)
    with _garbage_collection_paused():
        local, sends, receives = _by_peer(_repeat(steps, times), rank)
        relayed = [replace(step, pieces=step.relayed) for step in steps if step.relayed]
        _, relay_sends, relay_receives = _by_peer(_repeat(relayed, times), rank)
    return Plan(local=local, sends=sends, receives=receives, relay_sends=relay_sends, relay_receives=relay_receives)


def _by_peer(pieces: Iterable[Piece], rank: int) -> tuple[Pieces, dict[int, Pieces], dict[int, Pieces]]:
    """Those within the rank, those that it sends, by destination, and those that it receives, by source."""
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
    """The pieces of one tensor that a rank takes part in.

    Attributes:
        tensor: name of the logical tensor.
        first_holder: lowest rank of the block that holds some of it.
        relayed: those that it passes on, or that are passed on to it.
    """

    tensor: str
    first_holder: int
    pieces: list[Piece]
    relayed: list[Piece]


def plan_once(layouts: Layouts, rank: int) -> list[Step]:
    """The plan of what belongs to no layer, of each model chunk's first layer, and in it of the first expert.

    All other layers and experts are planned alike, so the time does not depend on their number.
    """
    train, block = layouts.train, _Block(layouts, rank)
    engine_rank = block.engine_rank
    first_layers = {layers[0] for layers in train.all_layers(layouts.arch.num_layers)}
    wanted = {
        g: _by_tensor(layouts.wanted(g, layers=first_layers, experts=FIRST_EXPERT)) for g in set(engine_rank.values())
    }
    held_by_block = {r: layouts.held(r, layers=first_layers, experts=FIRST_EXPERT) for r in block.ranks}
    steps: list[Step] = []
    for tensor, boxes in _holders(held_by_block).items():
        pieces: list[Piece] = []
        relayed: list[Piece] = []
        for turn, (box, held) in enumerate(boxes.items()):
            asking = block.asking(rank, held)
            common = {g: _overlaps(box, wanted[g].get(tensor, ())) for g in {engine_rank[r] for r in asking}}
            takers = [r for r in asking if common[engine_rank[r]]]
            for taker, source in choose_sources(takers, held, turn, layouts.ranks_per_node).items():
                sharing = block.sharing(taker, source)
                for to, whole in common[engine_rank[taker]] if rank in (source, *sharing) else ():
                    part = even_share(whole, sharing.index(taker), len(sharing))
                    if part is None:
                        continue
                    if rank in (taker, source):
                        pieces.append(_piece(source, taker, held[source], to, part))
                    others = (mate for mate in sharing if mate != taker and rank in (taker, mate))
                    relayed += [_piece(taker, mate, to, to, part) for mate in others]
        if pieces or relayed:
            first_holder = min(r for held in boxes.values() for r in held)
            steps.append(Step(tensor=tensor, first_holder=first_holder, pieces=pieces, relayed=relayed))
    arriving = (p for s in steps for p in (*s.pieces, *s.relayed) if p.destination_rank == rank)
    _check_coverage(wanted[engine_rank[rank]], arriving)
    return steps


class _Block:
    """The ranks that hold one whole model for training.

    Attributes:
        ranks: ascending.
        engine_rank: of each, its place in its generation replica.
    """

    def __init__(self, layouts: Layouts, rank: int) -> None:
        self.ranks = layouts.train.model_ranks(rank)
        self.engine_rank = {r: layouts.generation.coords(r).tp for r in self.ranks}
        self._node = {r: r // layouts.ranks_per_node for r in self.ranks}
        place = {r: (self._node[r], self.engine_rank[r]) for r in self.ranks}
        self._mates = {r: tuple(m for m in self.ranks if place[m] == place[r]) for r in self.ranks}

    def sharing(self, taker: int, source: int) -> tuple[int, ...]:
        """The ranks, `taker` among them, that each take a share of what a source has for all of them."""
        return (taker,) if self._node[taker] == self._node[source] else self._mates[taker]

    def asking(self, rank: int, held: Collection[int]) -> Sequence[int]:
        """The ranks whose pieces of a box `rank` must enumerate.

        If several ranks hold the box, or `rank` does, that is all of them. If one other rank alone holds it, only
        `rank` and the ranks that it shares its part with can matter.
        """
        if rank in held or len(held) > 1:
            return self.ranks
        (holder,) = held
        return self.sharing(rank, holder)


def _piece(source_rank: int, destination_rank: int, source: Placement, destination: Placement, box: Box) -> Piece:
    return Piece(
        source_rank=source_rank, destination_rank=destination_rank, source=source, destination=destination, box=box
    )


@contextmanager
def _garbage_collection_paused() -> Iterator[None]:
    """A large model has 200,000 pieces: the collector would walk all objects of the process again and again meanwhile,
    and take as long as the rest."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _repeat(steps: Iterable[Step], times: Repetitions) -> Iterator[Piece]:
    """The pieces of all layers and experts, in the order in which the ranks of the block list their placements."""

    def layer(step: Step) -> tuple[int, int | None]:
        return step.first_holder, layer_of(step.tensor)

    for (_, number), in_layer in groupby(steps, key=layer):
        parts = [
            _RepeatedPieces([piece for step in part for piece in step.pieces], times.experts if expert else 1)
            for expert, part in groupby(in_layer, key=lambda step: of_expert(step.tensor))
        ]
        for i in range(1 if number is None else times.layers[number]):
            for part in parts:
                yield from part.of_layer(i)


class _RepeatedPieces:
    """Pieces of a layer, or of an expert of it, with the placements that they share."""

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
                yield Piece(source_rank=source, destination_rank=taker, source=at[read], destination=at[write], box=box)


def choose_sources(
    takers: Sequence[int], held: Collection[int], turn: int, ranks_per_node: int = sys.maxsize
) -> dict[int, int]:
    """For every rank that takes part of a box, the rank it takes it from: itself if it can, else a holder of its own
    node, else of another, in turn.

    Args:
        takers: ranks that want some of the box, ascending.
        held: ranks that hold all of the box.
        turn: number of the box within its tensor. Starting every box with the same holder would give that one the
            odd taker each time (the first pipeline stage, for tied embeddings).
        ranks_per_node: consecutive ranks that share a node.

    Returns:
        Source rank by taker. The numbers of ranks of a node that two of its holders serve besides themselves differ by
        at most one, and so do the numbers of those that any two holders serve of nodes without one.
    """
    holders = sorted(held)
    nodes = {taker: taker // ranks_per_node for taker in takers}
    near = {node: [h for h in holders if h // ranks_per_node == node] for node in nodes.values()}
    served: Counter[int | None] = Counter()
    chosen = {}
    for taker, node in nodes.items():
        if taker in held:
            chosen[taker] = taker
            continue
        candidates, turns = (near[node], node) if near[node] else (holders, None)
        chosen[taker] = candidates[(turn + served[turns]) % len(candidates)]
        served[turns] += 1
    return chosen


def _holders(held_by_block: Mapping[int, Iterable[Placement]]) -> Holders:
    """Every box of the training layout with the block's ranks that hold it. Same order on every rank of the block."""
    out: Holders = {}
    for rank, placements in held_by_block.items():
        for placement in placements:
            held = out.setdefault(placement.tensor, {}).setdefault(placement.box, {})
            # with both ends of the model on a rank, tied embeddings are listed twice: read the embedding
            held.setdefault(rank, placement)
    return out


def _by_tensor(placements: Iterable[Placement]) -> dict[str, list[Placement]]:
    out: defaultdict[str, list[Placement]] = defaultdict(list)
    for placement in placements:
        out[placement.tensor].append(placement)
    return dict(out)


def _overlaps(box: Box, placements: Iterable[Placement]) -> list[tuple[Placement, Box]]:
    """The placements that want some of `box`, each with what it wants."""
    parts = ((placement, intersect(box, placement.box)) for placement in placements)
    return [(placement, part) for placement, part in parts if part is not None]


def _check_coverage(wanted: dict[str, list[Placement]], pieces: Iterable[Piece]) -> None:
    """Every wanted element comes exactly once.

    Two source boxes of a tensor are the same or disjoint, and of equal ones a single one is chosen; so the pieces of a
    placement are disjoint, and equal volumes are enough.
    """
    arriving: Counter[Placement] = Counter()
    for piece in pieces:
        arriving[piece.destination] += volume(piece.box)
    for placements in wanted.values():
        for placement in placements:
            assert arriving[placement] == volume(placement.box), f"{placement} gets {arriving[placement]} elements"
