"""Lists logical tensors: every weight of the model once, whatever the layout. Torch-free.

A **logical tensor** is a weight of the model under its Hugging Face name, its rows and columns taken apart into axes:

    q_proj of a layer           (kv_group, query, head_dim, hidden)
    an expert's down_proj       (hidden, ffn)
    gate_up_proj of gpt-oss     (expert, half, ffn, hidden), of which its files have (expert, hidden, ffn, half)
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

Box = tuple[tuple[int, int], ...]
"""Half-open interval per logical axis."""


@dataclass(frozen=True, kw_only=True)
class LogicalTensor:
    """Describes a weight of the whole model.

    Attributes:
        name: its Hugging Face name.
        shape: size of each logical axis. Row-major, the elements come in the order of the Hugging Face tensor, unless
            `file_axes` says otherwise.
        hf_shape: shape of the Hugging Face tensor.
        kind: how it is initialised: "matrix", "bias" (zeros), "norm" (ones), or "buffer": zeros, which are not trained,
            and float32 whatever the type of the weights. A norm that multiplies by 1 + weight has a "bias".
        file_axes: the logical axes in the order in which the Hugging Face tensor has them; None: in their own.
    """

    name: str
    shape: tuple[int, ...]
    hf_shape: tuple[int, ...]
    kind: str
    file_axes: tuple[int, ...] | None = None

    @property
    def order(self) -> tuple[int, ...]:
        """Number the logical axes in the order of the file."""
        return self.file_axes or tuple(range(len(self.shape)))

    def in_file(self) -> LogicalTensor:
        """Describe the same weight with its axes in the order of the file."""
        return replace(self, shape=tuple(self.shape[axis] for axis in self.order), file_axes=None)

    @property
    def box(self) -> Box:
        return tuple((0, n) for n in self.shape)


def volume(box: Box) -> int:
    """Count the elements in a box."""
    return math.prod(hi - lo for lo, hi in box)


def intersect(a: Box, b: Box) -> Box | None:
    """Find the common part of two boxes of the same tensor, or None."""
    out = tuple((max(x[0], y[0]), min(x[1], y[1])) for x, y in zip(a, b, strict=True))
    return out if all(lo < hi for lo, hi in out) else None


def even_share(box: Box, number: int, count: int) -> Box | None:
    """Cut out part `number` of `count` even parts of a box; None if there are not enough rows for it to get one."""
    if count == 1:
        return box
    axis = next((axis for axis, (lo, hi) in enumerate(box) if hi - lo >= count), 0)
    lo, hi = box[axis]
    first, last = (lo + (hi - lo) * i // count for i in (number, number + 1))
    return (*box[:axis], (first, last), *box[axis + 1 :]) if first < last else None


def relative(box: Box, outer: Box) -> Box:
    """Move a box into the coordinates of another that contains it."""
    return tuple((lo - base, hi - base) for (lo, hi), (base, _) in zip(box, outer, strict=True))


def table(name: str, kind: str, *, out_axes: int = 1, **axes: int) -> LogicalTensor:
    """Make a logical tensor whose first `out_axes` axes are the Hugging Face tensor's rows, the rest its columns."""
    shape = tuple(axes.values())
    hf_shape = (math.prod(shape[:out_axes]), *((math.prod(shape[out_axes:]),) if shape[out_axes:] else ()))
    return LogicalTensor(name=name, shape=shape, hf_shape=hf_shape, kind=kind)


def norm(name: str, width: int, *, zero_centered: bool) -> LogicalTensor:
    """Make the logical tensor of a norm that multiplies by its weight or, zero-centered, by 1 + weight."""
    return table(name, "bias" if zero_centered else "norm", width=width)
