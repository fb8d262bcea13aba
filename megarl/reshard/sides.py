"""Describes the two sides of a reshard: which ranks hold a model's weights, and where. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from megarl.models.architecture import Architecture
from megarl.models.parameter_names import ParameterNames
from megarl.models.placements import EVERY, Placement
from megarl.models.weights import engine_placements, training_placements
from megarl.parallel.layout import GenerationLayout, TrainLayout
from megarl.reshard.repeat import Runs


class PlacementsOf(Protocol):
    """Lists what a rank holds; `layers` and `experts` leave others out."""

    def __call__(
        self, rank: int, *, layers: Container[int] = EVERY, experts: Container[int] = EVERY
    ) -> Iterator[Placement]: ...


@dataclass(frozen=True, kw_only=True)
class Side:
    """Says which ranks hold a model's weights, and where.

    Attributes:
        copies: the ranks, ascending, of each copy of the model.
        placements: of a rank.
        place: of a rank in its copy; ranks of one place have the same placements.
        runs: layers and experts that are alike.
        vocab_rows: rows of the embedding, and of the output layer, on each rank that has them, padding included.
    """

    arch: Architecture
    copies: Sequence[tuple[int, ...]]
    placements: PlacementsOf
    place: Callable[[int], object]
    runs: Runs
    vocab_rows: int


def training_runs(arch: Architecture, layout: TrainLayout) -> Runs:
    """List the layers and experts that are alike on every rank of a training layout."""
    experts = layout.expert_parts(arch.num_experts)
    layers = [
        chunk for chunk in layout.all_layers(arch.num_layers) if chunk
    ]  # some hold the embedding or the loss alone
    return Runs(layers=layers, experts=experts)


def training_side(arch: Architecture, layout: TrainLayout, names: ParameterNames) -> Side:
    """Describe a model in a training layout, in the names of `training_placements`."""
    return Side(
        arch=arch,
        copies=layout.copies,
        placements=partial(training_placements, arch, layout, names=names),
        place=layout.place,
        runs=training_runs(arch, layout),
        vocab_rows=arch.padded_vocab_size(layout.tp) // layout.tp,
    )


def engine_side(arch: Architecture, layout: GenerationLayout, vocab_rows: int | None = None) -> Side:
    """Describe a model in the engines of a generation layout, in the names of `engine_placements`.

    Args:
        vocab_rows: see `engine_placements`.
    """

    def placements(
        rank: int, *, layers: Container[int] = EVERY, experts: Container[int] = EVERY
    ) -> Iterator[Placement]:
        place = layout.coords(rank).tp
        return engine_placements(arch, layout.split, place, vocab_rows=vocab_rows, layers=layers, experts=experts)

    return Side(
        arch=arch,
        copies=[layout.replica_ranks(replica) for replica in range(layout.replicas)],
        placements=placements,
        place=lambda rank: layout.coords(rank).tp,
        runs=Runs(experts=layout.split.expert_parts(arch.num_experts)),
        vocab_rows=vocab_rows or arch.padded_vocab_size(layout.tp) // layout.tp,
    )


def copies_of_ranks(source: Side, target: Side) -> dict[int, int]:
    """Give, by rank, the number of the source's copy that it belongs to; or takes from, where it belongs to none."""
    copies = {r: number for number, ranks in enumerate(source.copies) for r in ranks}
    without = sorted(r for ranks in target.copies for r in ranks if r not in copies)
    return copies | {r: i * len(source.copies) // len(without) for i, r in enumerate(without)}


def blocks(source: Side, target: Side) -> list[tuple[int, ...]]:
    """List the ranks, ascending, of each copy of the source's model together with those that take from it."""
    members: dict[int, list[int]] = {number: [] for number in range(len(source.copies))}
    for rank, number in sorted(copies_of_ranks(source, target).items()):
        members[number].append(rank)
    return [tuple(ranks) for ranks in members.values()]
