"""Says where a rank holds a part of a weight. Torch-free.

A **placement** says which box of a logical tensor a rank holds, and where: which rows of which parameter, viewed how.
From these come random initialisation, import, export and the reshard plan; vocabulary padding, tied embeddings and
KV-head replication are nothing but particular boxes.

    Megatron's linear_qkv    rows of [kv_group, query... k v, head_dim], kv groups split over TP
    the engine's qkv_proj    rows of [all queries | all keys | all values], heads split over TP
    an expert's down_proj    a parameter of its own in Megatron, row e of `w2_weight` in the engine
"""

from __future__ import annotations

import math
import sys
from collections.abc import Container
from dataclasses import dataclass
from typing import NamedTuple

from megarl.models.tensors import Box
from megarl.parallel.experts import ExpertPlace

EVERY = range(sys.maxsize)
"""All layers, or all experts."""


class Placement(NamedTuple):
    """Says where a rank holds a box of a logical tensor.

    `parameter[rows[0]:rows[1]].view(view)`, narrowed to `within` on each axis, has the shape of `box`.

    Attributes:
        tensor: name of the logical tensor.
        box: the part of it held here.
        param: name of the physical parameter on the rank.
        rows: half-open range along the parameter's first axis.
        view: shape those rows are viewed as; one entry per logical axis.
        within: half-open range per axis of the view.
    """

    tensor: str
    box: Box
    param: str
    rows: tuple[int, int]
    view: tuple[int, ...]
    within: Box

    @property
    def columns(self) -> int:
        """Count the elements in a row of the parameter."""
        first, last = self.rows
        return math.prod(self.view) // (last - first)


def geometry(placement: Placement, part: Box) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """Compute size, stride and offset within the parameter of `parameter[rows].view(view)[within][part]`, elements.

    Args:
        part: half-open range per axis, within the placement's box.
    """
    stride = tuple(math.prod(placement.view[axis + 1 :]) for axis in range(len(placement.view)))
    starts = (base + lo for (base, _), (lo, _) in zip(placement.within, part, strict=True))
    return (
        tuple(hi - lo for lo, hi in part),
        stride,
        placement.rows[0] * placement.columns + sum(s * i for s, i in zip(stride, starts, strict=True)),
    )


def place_whole(tensor: str, param: str, shape: tuple[int, ...]) -> Placement:
    """Place a tensor that every rank holds entirely."""
    box = tuple((0, n) for n in shape)
    return Placement(tensor=tensor, box=box, param=param, rows=(0, shape[0]), view=shape, within=box)


def place_filled(tensor: str, param: str, box: Box, first_row: int = 0, rows: int | None = None) -> Placement:
    """Place a box that fills its rows of the parameter.

    Args:
        first_row: first row of the parameter that the box fills.
        rows: how many it fills; by default one for each along the box's first axis.
    """
    view = tuple(hi - lo for lo, hi in box)
    last = first_row + (view[0] if rows is None else rows)
    within = tuple((0, n) for n in view)
    return Placement(tensor=tensor, box=box, param=param, rows=(first_row, last), view=view, within=within)


@dataclass(frozen=True, kw_only=True)
class LayerPlace:
    """Names a layer and a tensor-parallel rank.

    Attributes:
        tensors: prefix of the names of its tensors: "model.layers.3.".
        params: prefix of the names of its parameters: "0.decoder.layers.1.".
        hidden: residual width.
        tp, rank: size of the tensor-parallel group, and the rank in it.
        expert_place: the rank's place among those with the layer's experts.
        grouped_experts: whether one module of the training layout's model holds a matrix of each of the rank's experts,
            as for a grouped GEMM; otherwise each expert is a module.
        experts: place these alone.
    """

    tensors: str
    params: str
    hidden: int
    tp: int
    rank: int
    expert_place: ExpertPlace
    grouped_experts: bool = False
    experts: Container[int] = EVERY

    def whole(self, tensor: str, param: str, *shape: int) -> Placement:
        """Place a tensor of the layer that every rank holds entirely."""
        return place_whole(self.tensors + tensor, self.params + param, shape)
