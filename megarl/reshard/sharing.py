"""Finds the engine parameters that are training parameters already: the same elements, same order. Torch-free.

Where a rank's slices coincide in both layouts, the engine can read the training parameter's memory: nothing is copied,
and there is no second copy. In identical layouts that is all but the queries, keys and values, which Megatron-Core
interleaves by KV group and the engines do not, and experts, which the engines stack; with a pipeline it is so for the
layers of the rank's own stage.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import dataclass

from megarl.models.placements import EVERY, Placement, geometry
from megarl.models.tensors import relative
from megarl.models.weights import EMBEDDING, OUTPUT
from megarl.reshard.plan import by_tensor
from megarl.reshard.repeat import expert_of, repetitions
from megarl.reshard.sides import Side

ALIGNMENT = 8
"""Elements. Kernels read 16 bytes at a time, so a parameter must not begin at an odd place within another."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedPlace:
    """Locates an engine parameter, whole, within a training parameter of the same rank.

    Attributes:
        source: name of the training parameter.
        offset: of the engine parameter's first element from the training parameter's, elements.
    """

    source: str
    offset: int


def plan_shared(source: Side, target: Side, rank: int, *, first_layers: bool = False) -> dict[str, SharedPlace]:
    """Find the engine parameters of `rank` that are contiguous parts of its training parameters, by name.

    The rows of an engine parameter that no placement covers are vocabulary padding. They must be in the training
    parameter as well, where they are its padding: both end the vocabulary, and no engine draws a token from them.

    Args:
        source, target: training and generation.
        first_layers: look only at the first layer of each of the rank's model chunks, which the others are like.
    """
    times = repetitions(source.arch, source.runs, target.runs)
    layers: Container[int] = times.layers if first_layers else EVERY
    training, engine = (list(side.placements(rank, layers=layers, experts=times.experts)) for side in (source, target))
    room, needed = _sizes(source, training), _sizes(target, engine)
    return {
        name: place
        for name, place in _same_order(training, engine).items()
        if 0 <= place.offset <= room[place.source] - needed[name]
    }


def _same_order(training: Iterable[Placement], engine: Iterable[Placement]) -> dict[str, SharedPlace]:
    """Find the engine parameters whose placements all lie in one training parameter, at the same distance."""
    sources = by_tensor(training)
    places: dict[str, SharedPlace | None] = {}
    for placement in engine:
        place = _within(sources.get(placement.tensor, ()), placement)
        places[placement.param] = place if places.get(placement.param, place) == place else None
    return {name: place for name, place in places.items() if place}


def _within(sources: Iterable[Placement], engine: Placement) -> SharedPlace | None:
    """Find the placement's elements in a training parameter, in the same order."""
    for source in sources:
        if all(lo <= first and last <= hi for (lo, hi), (first, last) in zip(source.box, engine.box, strict=True)):
            _, strides, start = geometry(source, relative(engine.box, source.box))
            size, engine_strides, engine_start = geometry(engine, relative(engine.box, engine.box))
            offset = start - engine_start
            axes = zip(size, strides, engine_strides, strict=True)
            if all(n == 1 or a == b for n, a, b in axes) and offset % ALIGNMENT == 0:
                return SharedPlace(source=source.param, offset=offset)
    return None


def _sizes(side: Side, placements: Iterable[Placement]) -> dict[str, int]:
    """Count the elements of each parameter, given the placements of its first expert."""
    sizes: dict[str, int] = {}
    for placement in placements:
        rows = placement.rows[1]
        if placement.tensor in (EMBEDDING, OUTPUT):
            rows = side.vocab_rows
        elif side.arch.moe and expert_of(placement.tensor) is not None and expert_of(placement.param) is None:
            rows = len(side.runs.experts[0])
        sizes[placement.param] = max(sizes.get(placement.param, 0), rows * placement.columns)
    return sizes
