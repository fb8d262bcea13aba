"""A sequence of rows that lie on disk, one of which is an object while it is used."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, TypeVar, overload

from megarl.data.row_index import Index

T = TypeVar("T")


class RowSet(Sequence[T], ABC):
    """The rows of an index, in their order.

    Attributes:
        remarks: on the rows, and on what was left out, for the start of the run.
    """

    def __init__(self, index: Index, remarks: tuple[str, ...]) -> None:
        self._index, self.remarks = index, remarks

    def __len__(self) -> int:
        return len(self._index.rows)

    @overload
    def __getitem__(self, i: int) -> T: ...
    @overload
    def __getitem__(self, i: slice) -> list[T]: ...
    def __getitem__(self, i: int | slice) -> T | list[T]:
        if isinstance(i, slice):
            return [self[j] for j in range(*i.indices(len(self)))]
        return self._read(self._index.rows[i])

    @property
    def digest(self) -> str:
        """The digest of the rows and of what tokens depend on, in order; known since they were looked at."""
        return self._index.digest

    def in_common(self, other: RowSet[T]) -> int:
        """Count the rows whose prompts, or sequences, the other set has too."""
        return self._index.in_common(other._index)

    @abstractmethod
    def _read(self, fields: Any) -> T:
        """Read a row, by its `scan.FIELDS`."""
