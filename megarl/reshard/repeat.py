"""Layers are alike and so are experts: what holds for one holds for the others, with other numbers in the names.

Planning looks at the first layer of every model chunk and at the first expert; this counts out the rest.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from megarl.models.architecture import Architecture
from megarl.models.placements import Placement
from megarl.parallel.layout import TrainLayout

FIRST_EXPERT = (0,)
"""The experts that are looked at."""

_LAYER, _EXPERT = re.compile(r"\blayers\.(\d+)\."), re.compile(r"experts\.(\d+)\.")


def layer_of(name: str) -> int | None:
    """Number of the layer in the name of a tensor or parameter; None outside the layers."""
    found = _LAYER.search(name)
    return int(found[1]) if found else None


def of_expert(name: str) -> bool:
    """Whether the tensor or parameter is one expert's own."""
    return _EXPERT.search(name) is not None


@dataclass(frozen=True, kw_only=True)
class Repetitions:
    """How often what is planned once occurs.

    Attributes:
        layers: of a model chunk, by the number of its first one.
        experts: in each layer.
    """

    layers: Mapping[int, int]
    experts: int

    def of(self, tensor: str) -> int:
        """Tensors that the one of this name stands for."""
        number = layer_of(tensor)
        return (1 if number is None else self.layers[number]) * (self.experts if of_expert(tensor) else 1)


def repetitions(arch: Architecture, layout: TrainLayout | None = None) -> Repetitions:
    """Those of a model that a layout cuts into chunks; without one it is whole."""
    chunks = layout.all_layers(arch.num_layers) if layout else [range(arch.num_layers)]
    layers = {chunk[0]: len(chunk) for chunk in chunks}
    return Repetitions(layers=layers, experts=arch.moe.num_experts if arch.moe else 1)


class RepeatedPlacement:
    """A placement of a chunk's first layer and the first expert, from which those of the others follow."""

    __slots__ = ("_first", "_param", "_stacked", "_tensor")

    def __init__(self, first: Placement) -> None:
        self._first = first
        self._tensor, self._param = _Name(first.tensor), _Name(first.param)
        self._stacked = of_expert(first.tensor) and not of_expert(first.param)

    def at(self, layer: int, expert: int) -> Placement:
        """That of the layer `layer` further on in the chunk, and of this expert. Boxes are shared, not copied."""
        first = self._first
        return Placement(
            tensor=self._tensor.at(layer, expert),
            box=first.box,
            param=self._param.at(layer, expert),
            rows=(expert, expert + 1) if self._stacked else first.rows,
            view=first.view,
            index=first.index,
        )


class _Name:
    """A name with places for the numbers of layer and expert."""

    __slots__ = ("_first_layer", "_pattern")

    def __init__(self, name: str) -> None:
        self._first_layer = layer_of(name) or 0
        self._pattern = _EXPERT.sub("experts.{expert}.", _LAYER.sub("layers.{layer}.", name))

    def at(self, layer: int, expert: int) -> str:
        return self._pattern.format(layer=self._first_layer + layer, expert=expert)
