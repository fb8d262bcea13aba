"""Engine parameters in the training parameters' memory: the tensors that an engine shares."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from megarl.models.tensors import EMBEDDING
from megarl.reshard.layouts import Layouts
from megarl.reshard.sharing import SharedPlace, plan_shared


class SharedParameters:
    """The engine's parameters on this rank that are training parameters.

    Attributes:
        places: by engine parameter; empty until the engine has asked for its `tensors`.
    """

    def __init__(self, layouts: Layouts, rank: int, source: Mapping[str, Tensor], *, none: bool = False) -> None:
        """
        Args:
            source: training parameters by the names of `training_placements`.
            none: nothing is shared, because the training parameters leave.
        """
        self._layouts, self._rank, self._source, self._none = layouts, rank, source, none
        self.places: dict[str, SharedPlace] = {}

    @torch.no_grad()
    def tensors(self, shapes: Mapping[str, Sequence[int]]) -> Mapping[str, Tensor]:
        """The training parameters as the engine sees them, by engine parameter: an `Share`.

        Args:
            shapes: of the engine's parameters.
        """
        if self._none:
            return {}
        layouts = replace(self._layouts, vocab_rows=shapes[EMBEDDING][0])
        self.places = plan_shared(layouts, self._rank)
        return shared_tensors(self.places, self._source, shapes)

    def check(self, engine: Mapping[str, Tensor]) -> None:
        """Asserts that each shared engine parameter is where its training parameter is.

        A training parameter that had been moved would leave the engine with the weights of that moment, or with memory
        that belongs to something else by now.
        """
        for name, place in self.places.items():
            parameter = self._source[place.source]
            there = parameter.data_ptr() + place.offset * parameter.element_size()
            assert engine[name].data_ptr() == there, f"{name} is no longer where {place.source} is: one of them moved"


@torch.no_grad()
def shared_tensors(
    places: Mapping[str, SharedPlace], source: Mapping[str, Tensor], shapes: Mapping[str, Sequence[int]]
) -> dict[str, Tensor]:
    """The training parameters as the engine sees them, by engine parameter.

    Args:
        places: of this rank.
        source: training parameters by the names of `training_placements`.
        shapes: of the engine parameters.
    """
    tensors = {}
    for name, place in places.items():
        numel = torch.Size(shapes[name]).numel()
        flat = source[place.source].detach().view(-1)[place.offset : place.offset + numel]
        tensors[name] = flat.view(*shapes[name])
    return tensors
