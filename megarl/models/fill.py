"""Fills physical parameters from logical tensors, and names what a tensor's random start is."""

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


def local_view(parameter: Tensor, placement: Placement) -> Tensor:
    """The part of a physical parameter that a placement names, with the shape of its box."""
    lo, hi = placement.rows
    view = parameter[lo:hi].view(placement.view)
    return view[tuple(slice(*i) for i in placement.index)]


@torch.no_grad()
def fill(
    parameters: Mapping[str, Tensor],
    placements: Iterable[Placement],
    tensors: Mapping[str, LogicalTensor],
    source: Source,
) -> None:
    """Write every placement's box from `source`, converted to the parameter's type; padding rows become zero."""
    for parameter in parameters.values():
        parameter.zero_()
    for place in placements:
        local_view(parameters[place.param], place).copy_(source(tensors[place.tensor], place.box))


def random_source(arch: Architecture, seed: int) -> Source:
    """Random initial weights that depend on (seed, tensor name) alone, hence not on the layout."""

    @lru_cache(maxsize=1)  # a rank may hold several boxes of a tensor, one after the other
    def whole(tensor: LogicalTensor) -> Tensor:
        if tensor.kind != "matrix":
            return torch.full(tensor.shape, 1.0 if tensor.kind == "norm" else 0.0)
        digest = hashlib.sha256(f"{seed}/{tensor.name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
        return torch.randn(tensor.shape, generator=generator) * arch.init_std

    return lambda tensor, box: whole(tensor)[tuple(slice(*i) for i in box)]
