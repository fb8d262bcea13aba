"""Counts out layers and experts that are alike: what holds for one holds for the others, with other numbers.

Planning looks at the first layer of every run and at the first expert.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise

from megarl.models.architecture import Architecture
from megarl.models.placements import Placement

FIRST_EXPERT = (0,)
"""The experts that are looked at."""

_LAYER, _EXPERT = re.compile(r"\blayers\.(\d+)\."), re.compile(r"experts\.(\d+)\.")


def layer_of(name: str) -> int | None:
    """Read the layer's number in the name of a tensor or parameter; None outside the layers."""
    match = _LAYER.search(name)
    return int(match[1]) if match else None


def of_expert(name: str) -> bool:
    """Whether the tensor or parameter is one expert's own."""
    return _EXPERT.search(name) is not None


@dataclass(frozen=True, kw_only=True)
class Repetitions:
    """Says how often what is planned once occurs.

    Attributes:
        layers: how many are alike, by the number of the first.
        experts: in each layer.
    """

    layers: Mapping[int, int]
    experts: int

    def of(self, tensor: str) -> int:
        """Count the tensors that the one of this name stands for."""
        number = layer_of(tensor)
        return (1 if number is None else self.layers[number]) * (self.experts if of_expert(tensor) else 1)


def repetitions(arch: Architecture, *runs: Iterable[range]) -> Repetitions:
    """Count out a model whose layers of one kind are alike within the runs of every side (`Side.runs`).

    Runs of 0-3 and 4-7 on one side and of 0-5 and 6-7 on the other make three stretches, of 4, 2 and 2 layers.
    """
    firsts = sorted({*arch.firsts, *(run.start for side in runs for run in side)})
    layers = {first: after - first for first, after in pairwise([*firsts, arch.num_layers])}
    return Repetitions(layers=layers, experts=arch.moe.num_experts if arch.moe else 1)


class RepeatedPlacement:
    """Derives the placements of the other layers of a run, and of the other experts, from that of the first."""

    __slots__ = ("_first", "_param", "_stacked", "_tensor")

    def __init__(self, first: Placement) -> None:
        self._first = first
        self._tensor, self._param = _Name(first.tensor), _Name(first.param)
        self._stacked = of_expert(first.tensor) and not of_expert(first.param)

    def at(self, layer: int, expert: int) -> Placement:
        """Shift the placement by `layer` layers, and to this expert. Boxes are shared, not copied."""
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
