"""Maps a box of a logical tensor to its place in the Hugging Face tensor. Torch-free.

Logical axes flatten row-major into the axes of the Hugging Face tensor, so that a box is a union of ranges there. One
range per axis is read, the tightest that covers the box; indexing cuts off the rest.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from megarl.models.tensors import Box, LogicalTensor


@dataclass(frozen=True, kw_only=True)
class FileSlice:
    """Places a box in a Hugging Face tensor `hf`: the box is `hf[ranges].view(view)[index]`.

    Attributes:
        ranges: half-open range per axis of the Hugging Face tensor.
        view: shape of those ranges with one entry per logical axis.
        index: half-open range per logical axis of the view.
    """

    ranges: Box
    view: tuple[int, ...]
    index: Box


def file_slice(tensor: LogicalTensor, box: Box) -> FileSlice:
    """Find the place of a box; for the boxes of a tensor-parallel split it covers nothing but the box."""
    ranges, view, index = [], [], []
    axis = 0
    for i, size in enumerate(tensor.hf_shape):
        first = axis
        while axis < len(tensor.shape) and math.prod(tensor.shape[first:axis]) < size:
            axis += 1
        if i == len(tensor.hf_shape) - 1:
            axis = len(tensor.shape)  # axes of size 1 that are left
        span, shape, part = _flat_range(tensor.shape[first:axis], box[first:axis])
        ranges.append(span)
        view += shape
        index += part
    return FileSlice(ranges=tuple(ranges), view=tuple(view), index=tuple(index))


def _flat_range(shape: tuple[int, ...], box: Box) -> tuple[tuple[int, int], list[int], list[tuple[int, int]]]:
    """Find the range of flattened indices around a box, that range's shape, and the box in it."""
    if not shape:  # the file has an axis of size 1 that the logical tensor lacks
        return (0, 1), [], []
    lead = 0  # leading axes on which the box is a single index do not widen the range
    while lead < len(shape) - 1 and box[lead][1] - box[lead][0] == 1:
        lead += 1
    start, stride = 0, math.prod(shape)
    for size, (lo, _) in zip(shape[: lead + 1], box, strict=False):
        stride //= size
        start += lo * stride
    extent = box[lead][1] - box[lead][0]
    view = [*(1 for _ in range(lead)), extent, *shape[lead + 1 :]]
    index = [*((0, n) for n in view[: lead + 1]), *box[lead + 1 :]]
    return (start, start + extent * stride), view, index
