"""Which engine parameters are training parameters already: the same elements in the same order. Torch-free.

Where a rank's slices coincide in both layouts, the engine can read the training parameter's memory: nothing is copied,
and there is no second copy. In identical layouts that is all but the queries, keys and values, which Megatron-Core
interleaves by KV group and the engines do not, and experts, which the engines stack; with a pipeline it is so for the
layers of the rank's own stage.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from megarl.models.architecture import Architecture
from megarl.models.placements import Placement, geometry
from megarl.models.tensors import EMBEDDING, OUTPUT, relative
from megarl.reshard.layouts import Layouts
from megarl.reshard.repeat import FIRST_EXPERT, of_expert

ALIGNMENT = 8
"""Elements. Kernels read 16 bytes at a time, so a parameter must not begin at an odd place within another."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedPlace:
    """Where an engine parameter lies, whole, within a training parameter of the same rank.

    Attributes:
        source: name of the training parameter.
        offset: of the engine parameter's first element from the training parameter's, elements.
    """

    source: str
    offset: int


def plan_shared(layouts: Layouts, rank: int, *, first_layers: bool = False) -> dict[str, SharedPlace]:
    """The engine parameters of `rank` that are contiguous parts of its training parameters, by name.

    The rows of an engine parameter that no placement covers are vocabulary padding. They must be in the training
    parameter as well, where they are its padding: both end the vocabulary, and no engine draws a token from them.

    Args:
        first_layers: look only at the first layer of each of the rank's model chunks, which the others are like.
    """
    arch, train, generation = layouts.arch, layouts.train, layouts.generation
    stage = train.coords(rank).pp
    chunks = [train.layers(arch.num_layers, stage, chunk) for chunk in range(train.chunks)]
    layers = {layer for chunk in chunks for layer in (chunk[:1] if first_layers else chunk)}
    held = list(layouts.held(rank, layers=layers, experts=FIRST_EXPERT))
    wanted = list(layouts.wanted(generation.coords(rank).tp, layers=layers, experts=FIRST_EXPERT))
    room = _sizes(arch, held, arch.padded_vocab_size(train.tp) // train.tp)
    needed = _sizes(arch, wanted, layouts.vocab_rows or arch.padded_vocab_size(generation.tp) // generation.tp)
    return {
        name: place
        for name, place in _same_order(held, wanted).items()
        if 0 <= place.offset <= room[place.source] - needed[name]
    }


def _same_order(held: Iterable[Placement], wanted: Iterable[Placement]) -> dict[str, SharedPlace]:
    """The engine parameters whose placements all lie in one training parameter, at the same distance."""
    sources: dict[str, list[Placement]] = {}
    for placement in held:
        sources.setdefault(placement.tensor, []).append(placement)
    found: dict[str, SharedPlace | None] = {}
    for placement in wanted:
        place = _within(sources.get(placement.tensor, ()), placement)
        found[placement.param] = place if found.get(placement.param, place) == place else None
    return {name: place for name, place in found.items() if place}


def _within(sources: Iterable[Placement], wanted: Placement) -> SharedPlace | None:
    """Where the placement's elements lie in a training parameter, if they do so in the same order."""
    for source in sources:
        if all(lo <= first and last <= hi for (lo, hi), (first, last) in zip(source.box, wanted.box, strict=True)):
            _, strides, start = geometry(source, relative(wanted.box, source.box))
            size, wanted_strides, wanted_start = geometry(wanted, relative(wanted.box, wanted.box))
            offset = start - wanted_start
            axes = zip(size, strides, wanted_strides, strict=True)
            if all(n == 1 or a == b for n, a, b in axes) and offset % ALIGNMENT == 0:
                return SharedPlace(source=source.param, offset=offset)
    return None


def _sizes(arch: Architecture, placements: Iterable[Placement], vocab_rows: int) -> dict[str, int]:
    """Elements of each parameter, given the placements of its first expert."""
    out: dict[str, int] = {}
    for placement in placements:
        rows = placement.rows[1]
        if placement.tensor in (EMBEDDING, OUTPUT):
            rows = vocab_rows
        elif arch.moe and of_expert(placement.tensor) and not of_expert(placement.param):
            rows = arch.moe.num_experts
        out[placement.param] = max(out.get(placement.param, 0), rows * placement.columns)
    return out
