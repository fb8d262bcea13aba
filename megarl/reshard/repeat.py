"""Counts out layers and experts that are alike: what holds for one holds for the others, with other numbers.

Planning looks at the first layer, and at the first expert, of every run.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from megarl.models.architecture import Architecture
from megarl.models.placements import Placement

_OF_EXPERTS = re.compile(r"\bexperts\.")
_LAYER, _EXPERT = re.compile(r"\blayers\.(\d+)\."), re.compile(r"experts\.(?:\w+\.weight)?(\d+)\b")


def layer_of(name: str) -> int | None:
    """Read the layer's number in the name of a tensor or parameter; None outside the layers."""
    match = _LAYER.search(name)
    return int(match[1]) if match else None


def expert_of(name: str) -> int | None:
    """Read the expert's number in the name of a tensor or parameter; None if it is no expert's own."""
    match = _EXPERT.search(name)
    return int(match[1]) if match else None


def of_experts(name: str) -> bool:
    """Say whether a tensor is of one expert or, stacked, of all that a token may be sent to."""
    return _OF_EXPERTS.search(name) is not None


@dataclass(frozen=True, kw_only=True)
class Repetitions:
    """Counts the layers and experts that are like one that is planned.

    Attributes:
        layers: number of equal layers, by the number of the first.
        experts: number of equal experts of a layer, by the number of the first.
    """

    layers: Mapping[int, int]
    experts: Mapping[int, int]

    def of(self, tensor: str) -> int:
        """Count the tensors that the one of this name stands for."""
        number, expert = layer_of(tensor), expert_of(tensor)
        return (1 if number is None else self.layers[number]) * (1 if expert is None else self.experts[expert])


@dataclass(frozen=True, kw_only=True)
class Runs:
    """Lists ranges of layers, and of experts, whose placements on a side differ in their number alone.

    Attributes:
        layers: ranges of the model's layers, in their order.
        experts: ranges of each layer's experts; empty without experts.
    """

    layers: Sequence[range] = ()
    experts: Sequence[range] = ()


def repetitions(arch: Architecture, *sides: Runs) -> Repetitions:
    """Count out a model whose layers with the same weights, and whose experts, are alike within the runs of every side.

    Runs of 0-3 and 4-7 on one side and of 0-5 and 6-7 on the other make three stretches, of 4, 2 and 2 layers.
    """
    layers = {*arch.firsts_placed_alike, *(run.start for side in sides for run in side.layers)}
    experts = {0, *(run.start for side in sides for run in side.experts)}
    count = arch.moe.num_experts if arch.moe else 1
    return Repetitions(layers=_stretches(layers, arch.num_layers), experts=_stretches(experts, count))


def _stretches(firsts: Iterable[int], count: int) -> dict[int, int]:
    return {first: after - first for first, after in pairwise([*sorted(firsts), count])}


class RepeatedPlacement:
    """Derives the placements of the other layers of a run, and of the other experts, from that of the first."""

    __slots__ = ("_first", "_param", "_stacked", "_tensor")

    def __init__(self, first: Placement) -> None:
        self._first = first
        self._tensor, self._param = _Name(first.tensor), _Name(first.param)
        self._stacked = expert_of(first.tensor) is not None and expert_of(first.param) is None

    def at(self, layer: int, expert: int) -> Placement:
        """Shift the placement by so many layers and experts. Boxes are shared, not copied."""
        first = self._first
        return Placement(
            tensor=self._tensor.at(layer, expert),
            box=first.box,
            param=self._param.at(layer, expert),
            rows=(first.rows[0] + expert, first.rows[1] + expert) if self._stacked else first.rows,
            view=first.view,
            within=first.within,
        )


class _Name:
    """Holds a name with places for the numbers of layer and expert, the layer first."""

    __slots__ = ("_after", "_before", "_between", "_first_expert", "_first_layer")

    def __init__(self, name: str) -> None:
        self._first_layer, self._first_expert = layer_of(name), expert_of(name)
        self._before, self._between, self._after = name, "", ""
        if match := _LAYER.search(name):
            self._before, self._between = name[: match.start(1)], name[match.end(1) :]
            if within := _EXPERT.search(name):
                self._between, self._after = name[match.end(1) : within.start(1)], name[within.end(1) :]

    def at(self, layer: int, expert: int) -> str:
        if self._first_layer is None:
            return self._before
        if self._first_expert is None:
            return f"{self._before}{self._first_layer + layer}{self._between}"
        return f"{self._before}{self._first_layer + layer}{self._between}{self._first_expert + expert}{self._after}"
