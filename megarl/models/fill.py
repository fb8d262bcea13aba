"""Fills physical parameters from logical tensors, and draws random ones."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache

import torch
from torch import Tensor

from megarl.models.architecture import Architecture
from megarl.models.placements import Placement
from megarl.models.tensors import Box, LogicalTensor

Source = Callable[[LogicalTensor, Box], Tensor]
"""Gives a box of a logical tensor on demand."""


_OF_A_VOCABULARY = ("word_embeddings.weight", "output_layer.weight")
"""Parameters whose last rows may be padding, on some ranks all of them."""


def dtype_of(tensor: LogicalTensor, weights: torch.dtype) -> torch.dtype:
    """Give the type of a tensor in a model with weights of a type."""
    return torch.float32 if tensor.kind == "buffer" else weights


def as_logical(tensor: LogicalTensor, in_file: Tensor) -> Tensor:
    """View a box of the Hugging Face tensor, its axes taken apart, with the axes in their logical order."""
    return in_file.permute([tensor.order.index(axis) for axis in range(in_file.ndim)])


def local_view(parameter: Tensor, placement: Placement) -> Tensor:
    """View the part of a physical parameter that a placement names, with the shape of its box."""
    lo, hi = placement.rows
    view = parameter[lo:hi].view(placement.view)
    return view[tuple(slice(*i) for i in placement.within)]


@torch.no_grad()
def fill(
    parameters: Mapping[str, Tensor],
    placements: Iterable[Placement],
    tensors: Mapping[str, LogicalTensor],
    source: Source,
) -> None:
    """Write every placement's box from `source`, converted to the parameter's type; padding rows become zero.

    The placements name every element once: one that none names would be zero, and be trained from there.
    """
    by_parameter: dict[str, list[Placement]] = {name: [] for name in parameters}
    for place in placements:
        by_parameter[place.param].append(place)
    for name, places in by_parameter.items():
        check_covered(name, parameters[name], places)
        parameters[name].zero_()
        for place in places:
            local_view(parameters[name], place).copy_(source(tensors[place.tensor], place.box))


def check_covered(name: str, parameter: Tensor, placements: Iterable[Placement]) -> None:
    """Assert that the placements name every element of a parameter once, but for the padding of a vocabulary."""
    covered = torch.zeros(parameter.shape, dtype=torch.bool, device=parameter.device)
    for place in placements:
        part = local_view(covered, place)
        assert not part.any(), f"{name} has elements of two boxes, one of them of {place.tensor}"
        part.fill_(True)
    if name.endswith(_OF_A_VOCABULARY):
        filled = int(covered.all(-1).sum())
        assert covered[:filled].all() and not covered[filled:].any(), f"{name} is filled in parts"
    else:
        assert covered.all(), f"{name} has elements that no weight of the model fills: its family lacks a placement"


def random_source(arch: Architecture, seed: int) -> Source:
    """Draw initial weights that depend on (seed, tensor name) alone, hence not on the layout."""

    @lru_cache(maxsize=1)  # a rank may hold several boxes of a tensor, one after the other
    def whole(tensor: LogicalTensor) -> Tensor:
        if tensor.kind != "matrix":
            return torch.full(tensor.shape, 1.0 if tensor.kind == "norm" else 0.0)
        digest = hashlib.sha256(f"{seed}/{tensor.name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
        return torch.randn(tensor.shape, generator=generator) * arch.init_std

    return lambda tensor, box: whole(tensor)[tuple(slice(*i) for i in box)]
