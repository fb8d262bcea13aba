"""Measures how much memory the pages of a parquet file ask for, by their own headers. Torch-free.

A dictionary's entry may stand in many rows, and a page may be compressed to nearly nothing: a file's size on the disk
says little of the memory that its rows take.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

if TYPE_CHECKING:
    from pyarrow import parquet

MOST_TIMES = 1000
"""What is read may have so many times the bytes of what it is read from."""

INFLATED_BYTES = 64 * 2**20
"""Of a row group's columns that have more than that, together."""

BATCH_BYTES = 256 * 2**20
"""That the rows of a batch may come to."""

MOST_BYTES = 2**30
"""That a row, or all pages that are open at a time, may come to."""


class _Page(NamedTuple):
    """Describes a page: whether it is a dictionary, its size in bytes when it is unpacked, the number of its values."""

    dictionary: bool
    size: int
    values: int


def rows_at_a_time(f: BinaryIO, group: parquet.RowGroupMetaData, most: int, *, whole: bool) -> int:
    """Return how many rows of a row group can be read together.

    Args:
        f: the file, buffered.
        most: not more than these.
        whole: look at every page; else at the first of each column, where its dictionary is, and believe the footer.

    Raises:
        ValueError: the pages are malformed, or take more memory than rows do.
    """
    row, resident, inflated = 0, 0, 0
    for i in range(group.num_columns):
        column = group.column(i)
        start = _start(column)
        pages = list(_pages(f, column, start, whole=whole))
        packed = f.tell() - start if whole else column.total_compressed_size
        if not whole:
            pages.append(_Page(False, column.total_uncompressed_size, column.num_values))
        dictionary = max((page.size for page in pages if page.dictionary), default=0)
        size = sum(max(page.size, page.values) for page in pages)
        widest = max((page.size // max(page.values, 1) + 1 for page in pages if not page.dictionary), default=0)
        per_row = -(-sum(page.values for page in pages) // max(group.num_rows, 1))
        row += per_row * (widest + (dictionary if "BYTE_ARRAY" in column.physical_type else 0))
        resident += dictionary + (max((page.size for page in pages), default=0) if whole else 0)
        inflated += size if size > MOST_TIMES * packed else 0
    if inflated > INFLATED_BYTES:
        raise ValueError(f"{inflated} bytes are compressed more than {MOST_TIMES} times")
    if max(row, resident) > MOST_BYTES:
        raise ValueError(f"single rows or pages may take {max(row, resident)} bytes")
    return max(1, min(most, BATCH_BYTES // max(row, 1)))


def _start(column: parquet.ColumnChunkMetaData) -> int:
    """Return the byte where Arrow begins to read a column."""
    first, dictionary = column.data_page_offset, column.dictionary_page_offset or 0
    return int(dictionary if 0 < dictionary < first else first)


def _pages(f: BinaryIO, column: parquet.ColumnChunkMetaData, start: int, *, whole: bool) -> Iterator[_Page]:
    """Yield the pages that Arrow reads: up to as many values as the footer says, or the end of the column's bytes."""
    at, values = start, 0
    f.seek(start)
    while values < column.num_values and at < start + column.total_compressed_size:
        header = _struct(f)
        data = header.get(5) or header.get(8) or {}
        if not isinstance(data, dict):
            raise ValueError("a page's header is malformed")
        kind, size, packed, count = header.get(1, 0), header.get(2, 0), header.get(3, 0), data.get(1, 0)
        if any(not isinstance(number, int) or number < 0 for number in (kind, size, packed, count)):
            raise ValueError("a page's header has a size that is negative or no number")
        dictionary = kind == 2
        if dictionary or whole:
            yield _Page(dictionary, size, count)
        if not whole:
            return
        values += count
        at = f.seek(packed, 1)


def _struct(f: BinaryIO, depth: int = 0) -> dict[int, Any]:
    """Read the numbers and structs of a struct in Thrift's compact protocol, by the fields' numbers."""
    fields: dict[int, Any] = {}
    number = 0
    while head := _byte(f):
        number = number + (head >> 4) if head >> 4 else _number(f)
        kind = head & 15
        if kind in (4, 5, 6):
            fields[number] = _number(f)
        elif kind == 8:  # bytes: the least and the greatest value of a page
            f.seek(_unsigned(f), 1)
        elif kind == 12 and depth < 4:
            fields[number] = _struct(f, depth + 1)
        elif kind not in (1, 2):
            raise ValueError("a page's header is malformed")
    return fields


def _number(f: BinaryIO) -> int:
    value = _unsigned(f)
    return value >> 1 ^ -(value & 1)


def _unsigned(f: BinaryIO) -> int:
    value = 0
    for shift in range(0, 63, 7):
        byte = _byte(f)
        value |= (byte & 127) << shift
        if byte < 128:
            return value
    raise ValueError("a page's header is malformed")


def _byte(f: BinaryIO) -> int:
    byte = f.read(1)
    if not byte:
        raise ValueError("a page's header is cut off")
    return byte[0]
