"""Orders the rows of an epoch: easy ones first, or as a user's function says."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from megarl.data.row_files import RowRefused
from megarl.own_code import in_a_line
from megarl.registry import Registry

Order = Callable[[int, Any], Any]
"""(epoch, [N] the order it would have) -> [N] its order, the same whenever it is asked."""

_CURRICULA: Registry[Callable[[int, Sequence[Mapping[str, Any]]], Any]] = Registry("data.curriculum", "function")


def load_curriculum(name: str) -> Callable[[int, Sequence[Mapping[str, Any]]], Any] | None:
    """Return the function that `data.curriculum` names; None for a column, or for nothing.

    Raises:
        ValueError: as `Registry.load`.
    """
    return _CURRICULA.load(name) if ":" in name else None


def easy_first(difficulty: Any) -> Order:
    """Order rows by rising difficulty; rows of the same difficulty stay in the order that they would have had."""
    return lambda epoch, usual: usual[np.argsort(difficulty[usual], kind="stable")]


def as_asked(name: str, rows: Sequence[Mapping[str, Any]]) -> Order:
    """Order rows by the function that `data.curriculum` names."""
    function = load_curriculum(name)
    assert function is not None

    def order(epoch: int, usual: Any) -> Any:
        try:
            given = np.asarray(function(epoch, rows))
        except (Exception, SystemExit) as e:  # a user's function fails as it likes
            raise RowRefused(f"data.curriculum = {name} failed for epoch {epoch}: {in_a_line(e)}") from e
        integers = given.ndim == 1 and np.issubdtype(given.dtype, np.integer)
        if not integers or not np.array_equal(np.sort(given), np.arange(len(rows))):
            raise RowRefused(
                f"data.curriculum = {name} must give every position from 0 to {len(rows) - 1} once for epoch {epoch}"
            )
        return given

    return order


class Columns(Sequence[Mapping[str, Any]]):
    """Reads the columns of rows when they are asked for."""

    def __init__(self, read: Callable[[int], Mapping[str, Any]], count: int) -> None:
        self._read, self._count = read, count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, i: Any) -> Any:
        if isinstance(i, slice):
            return [self._read(j) for j in range(*i.indices(self._count))]
        if not -self._count <= i < self._count:
            raise IndexError(i)
        return self._read(i % self._count)

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        return (self._read(i) for i in range(self._count))
