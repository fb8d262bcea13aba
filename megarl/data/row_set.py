"""Holds a sequence of rows that lie on disk, each of which is an object only while it is used."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, TypeVar, overload

from megarl.data.row_files import open_file
from megarl.data.row_index import Index

T = TypeVar("T")

OPEN_FILES = 64
"""At a time: there may be more files of rows than a process can have open."""


class RowSet(Sequence[T], ABC):
    """Holds the rows of an index, in their order.

    Attributes:
        remarks: on the rows, and on what was left out, for the start of the run.
    """

    def __init__(self, index: Index, remarks: tuple[str, ...], *, reads_files: bool = True) -> None:
        """
        Args:
            reads_files: rows are read from their files; false: from what is stored in the index.
        """
        self._index, self.remarks = index, remarks
        self._file = lru_cache(OPEN_FILES)(lambda number: open_file(*index.files[number]))
        for number in range(min(len(index.files), OPEN_FILES) if reads_files else 0):
            self._file(number)  # what replaces one of these is not read

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
        """Return the digest of the rows, in order, and of what their tokens depend on; no row is read for it."""
        return self._index.digest

    def in_common(self, other: RowSet[T]) -> int:
        """Count the rows whose prompts, or sequences, the other set has too."""
        return self._index.in_common(other._index)

    def _source_and_columns(self, fields: Any) -> tuple[str, Mapping[str, Any]]:
        """Read a row from its file; raises RowsChanged if it is not the one that was looked at."""
        self._index.stored(fields)
        return self._file(int(fields["file"])).read(fields)

    @abstractmethod
    def _read(self, fields: Any) -> T:
        """Read a row, by its `scan.FIELDS`."""
