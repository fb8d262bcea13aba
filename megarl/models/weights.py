"""Fills physical parameters from logical tensors, and names what a tensor's random start is."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

from megarl.models.architecture import Architecture
from megarl.models.tensors import LogicalTensor, Placement, logical_tensors

Source = Callable[[LogicalTensor], Tensor]
"""Gives a logical tensor (with its logical shape) on demand."""


def local_view(parameter: Tensor, placement: Placement) -> Tensor:
    """The part of a physical parameter that a placement names, with the shape of its box."""
    lo, hi = placement.rows
    view = parameter[lo:hi].view(placement.view)
    return view[tuple(slice(*i) for i in placement.index)]


@torch.no_grad()
def fill(parameters: Mapping[str, Tensor], placements: Iterable[Placement], arch: Architecture, source: Source) -> None:
    """Write every placement's box from `source`, one logical tensor in memory at a time; padding rows become zero."""
    tensors = logical_tensors(arch)
    by_tensor: dict[str, list[Placement]] = {}
    for placement in placements:
        by_tensor.setdefault(placement.tensor, []).append(placement)
    for parameter in parameters.values():
        parameter.zero_()
    for name, places in by_tensor.items():
        whole = source(tensors[name])
        for place in places:
            box = whole[tuple(slice(*i) for i in place.box)]
            local_view(parameters[place.param], place).copy_(box)


def random_source(arch: Architecture, seed: int) -> Source:
    """Random initial weights that depend on (seed, tensor name) alone, hence not on the layout."""

    def source(tensor: LogicalTensor) -> Tensor:
        if tensor.kind != "matrix":
            return torch.full(tensor.shape, 1.0 if tensor.kind == "norm" else 0.0)
        digest = hashlib.sha256(f"{seed}/{tensor.name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
        return torch.randn(tensor.shape, generator=generator) * arch.init_std

    return source
