"""Engine parameters in the training parameters' memory: the tensors that an engine adopts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from megarl.reshard.alias import Alias


@torch.no_grad()
def shared_tensors(
    aliases: Mapping[str, Alias], source: Mapping[str, Tensor], shapes: Mapping[str, Sequence[int]]
) -> dict[str, Tensor]:
    """The training parameters as the engine sees them, by engine parameter.

    Args:
        aliases: of this rank.
        source: training parameters by the names of `training_placements`.
        shapes: of the engine parameters.
    """
    tensors = {}
    for name, alias in aliases.items():
        numel = torch.Size(shapes[name]).numel()
        flat = source[alias.source].detach().view(-1)[alias.offset : alias.offset + numel]
        tensors[name] = flat.view(*shapes[name])
    return tensors


def check_shared(aliases: Mapping[str, Alias], source: Mapping[str, Tensor], engine: Mapping[str, Tensor]) -> None:
    """Asserts that each aliased engine parameter is where its training parameter is.

    A training parameter that had been moved would leave the engine with the weights of that moment, or with memory
    that belongs to something else by now.
    """
    for name, alias in aliases.items():
        parameter = source[alias.source]
        there = parameter.data_ptr() + alias.offset * parameter.element_size()
        assert engine[name].data_ptr() == there, f"{name} is no longer where {alias.source} is: one of them has moved"
