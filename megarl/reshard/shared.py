"""Engine parameters in the training parameters' memory: the tensors that an engine adopts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from megarl.models.tensors import EMBEDDING
from megarl.reshard.alias import Alias, plan_aliases
from megarl.reshard.layouts import Layouts


class SharedParameters:
    """The engine's parameters on this rank that are training parameters.

    Attributes:
        aliases: by engine parameter; empty until the engine has asked for its `tensors`.
    """

    def __init__(self, layouts: Layouts, rank: int, source: Mapping[str, Tensor], *, none: bool = False) -> None:
        """
        Args:
            source: training parameters by the names of `training_placements`.
            none: nothing is shared, because the training parameters leave.
        """
        self._layouts, self._rank, self._source, self._none = layouts, rank, source, none
        self.aliases: dict[str, Alias] = {}

    @torch.no_grad()
    def tensors(self, shapes: Mapping[str, Sequence[int]]) -> Mapping[str, Tensor]:
        """The training parameters as the engine sees them, by engine parameter: an `Adopt`.

        Args:
            shapes: of the engine's parameters.
        """
        if self._none:
            return {}
        layouts = replace(self._layouts, vocab_rows=shapes[EMBEDDING][0])
        self.aliases = plan_aliases(layouts, self._rank)
        return shared_tensors(self.aliases, self._source, shapes)

    def check(self, engine: Mapping[str, Tensor]) -> None:
        """Asserts that each shared engine parameter is where its training parameter is.

        A training parameter that had been moved would leave the engine with the weights of that moment, or with memory
        that belongs to something else by now.
        """
        for name, alias in self.aliases.items():
            parameter = self._source[alias.source]
            there = parameter.data_ptr() + alias.offset * parameter.element_size()
            assert engine[name].data_ptr() == there, f"{name} is no longer where {alias.source} is: one of them moved"


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
