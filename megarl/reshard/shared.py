"""Puts engine parameters into the training parameters' memory: the tensors that an engine shares."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from megarl.models.weights import EMBEDDING
from megarl.parallel.layout import GenerationLayout
from megarl.reshard.sharing import SharedPlace, plan_shared
from megarl.reshard.sides import Side, engine_side


class SharedParameters:
    """Knows the engine's parameters on this rank that are training parameters.

    Attributes:
        places: by engine parameter; empty until the engine has asked for its `tensors`.
    """

    def __init__(
        self, side: Side, layout: GenerationLayout, rank: int, source: Mapping[str, Tensor], *, none: bool = False
    ) -> None:
        """
        Args:
            side: of training.
            layout: of generation.
            source: training parameters by the names of `training_placements`.
            none: nothing is shared, because the training parameters leave.
        """
        self._side, self._layout, self._rank, self._source, self._none = side, layout, rank, source, none
        self.places: dict[str, SharedPlace] = {}

    @torch.no_grad()
    def tensors(self, shapes: Mapping[str, Sequence[int]]) -> Mapping[str, Tensor]:
        """View training parameters as the engine sees them, by engine parameter: a `Share`.

        Args:
            shapes: of the engine's parameters.
        """
        if self._none:
            return {}
        engine = engine_side(self._side.arch, self._layout, shapes[EMBEDDING][0])
        self.places = plan_shared(self._side, engine, self._rank)
        tensors = {}
        for name, place in self.places.items():
            numel = torch.Size(shapes[name]).numel()
            flat = self._source[place.source].detach().view(-1)[place.offset : place.offset + numel]
            tensors[name] = flat.view(*shapes[name])
        return tensors

    def check(self, engine: Mapping[str, Tensor]) -> None:
        """Assert that each shared engine parameter is where its training parameter is.

        A training parameter that had been moved would leave the engine with the weights of that moment, or with memory
        that belongs to something else by now.
        """
        for name, place in self.places.items():
            parameter = self._source[place.source]
            there = parameter.data_ptr() + place.offset * parameter.element_size()
            assert engine[name].data_ptr() == there, f"{name} is no longer where {place.source} is: one of them moved"
