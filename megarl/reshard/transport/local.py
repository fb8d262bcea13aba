"""Within a rank: strided copies from parameter to parameter, nothing staged."""

from __future__ import annotations

from collections.abc import Iterable

from megarl.reshard.views import StridedView


def copy_local(pairs: Iterable[tuple[StridedView, StridedView]]) -> None:
    """Copies every source view into its destination view of the same size."""
    for source, destination in pairs:
        destination.tensor().copy_(source.tensor())
