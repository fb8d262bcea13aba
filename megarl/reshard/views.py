"""Views parts of parameters without holding the parameters' memory."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from megarl.models.placements import Placement, geometry
from megarl.models.tensors import Box


@dataclass(frozen=True, eq=False, slots=True)
class StridedView:
    """Describes part of a contiguous parameter, as geometry: the tensor is made anew at each use.

    A tensor view kept between two reshards would keep the parameter's storage alive, so that its memory could not be
    given back; and it would go on reading the old storage after an offload had moved the parameter.

    Attributes:
        parameter: the whole parameter. Its `data` may be replaced by a contiguous tensor of the same shape.
        size, stride: of the view, per axis, elements.
        offset: of the view's first element from the parameter's, elements.
    """

    parameter: torch.Tensor
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @property
    def numel(self) -> int:
        return math.prod(self.size)

    @property
    def nbytes(self) -> int:
        return self.numel * self.parameter.element_size()

    def tensor(self) -> torch.Tensor:
        """Make the view itself, detached. Writing to it writes to the parameter."""
        data = self.parameter.data
        return data.as_strided(self.size, self.stride, data.storage_offset() + self.offset)

    def flat_range(self, start: int, stop: int) -> Iterator[StridedView]:
        """Split into views that hold, one after the other, elements `start` to `stop` of this one in row-major order.

        At most two per axis: rest of a first row, whole rows, beginning of a last row; rows are split in the same way.
        """
        if start == 0 and stop == self.numel:
            yield self
            return
        row = math.prod(self.size[1:])
        (first, skip), (last, rest) = divmod(start, row), divmod(stop, row)
        if first == last:
            yield from self._row(first).flat_range(skip, rest)
            return
        if skip:
            yield from self._row(first).flat_range(skip, row)
            first += 1
        if first < last:
            size = (last - first, *self.size[1:])
            yield StridedView(self.parameter, size, self.stride, self.offset + first * self.stride[0])
        if rest:
            yield from self._row(last).flat_range(0, rest)

    def _row(self, i: int) -> StridedView:
        return StridedView(self.parameter, self.size[1:], self.stride[1:], self.offset + i * self.stride[0])


def view_of(parameter: torch.Tensor, placement: Placement, part: Box) -> StridedView:
    """View `parameter[rows].view(view)[index][part]` of a placement.

    Args:
        parameter: contiguous, `[rows or more, ...]`.
        part: half-open range per axis, within the placement's box.
    """
    return StridedView(parameter, *geometry(placement, part))


def copy_local(pairs: Iterable[tuple[StridedView, StridedView]]) -> None:
    """Copy every source view into its destination view of the same size, nothing staged."""
    for source, destination in pairs:
        destination.tensor().copy_(source.tensor())
