"""Rows of jsonl and parquet files. Torch-free."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple, cast

from megarl.data.files import DataFile, data_files

if TYPE_CHECKING:
    import pyarrow

BATCH_ROWS = 1024
"""Rows of a parquet file that are Python objects at a time."""

REMOTE_BLOCK = 2**20
"""Bytes that a store is asked for at a time."""


class Row(NamedTuple):
    """One row of a file.

    Attributes:
        source: where it is, counted from 1: "train.jsonl:17", "train.parquet row 17".
        columns: values by the columns' names.
    """

    source: str
    columns: Mapping[str, Any]


def read_rows(patterns: Sequence[str], what: str) -> list[Row]:
    """`iterate_rows`, all at once."""
    return list(iterate_rows(patterns, what))


def iterate_rows(patterns: Sequence[str], what: str) -> Iterator[Row]:
    """All rows of the files that the patterns match, in the order of `data_files`.

    Args:
        what: the configuration key that they come from, for messages.

    Raises:
        ValueError: as `data_files`; an empty or malformed file.
    """
    for file in data_files(patterns, what):
        empty = True
        for row in rows_of_file(file, what):
            empty = False
            yield row
        if empty:
            raise no_rows(file.name, what)


def has(columns: Mapping[str, Any], key: str) -> bool:
    """Whether there is such a column, or, for "reward_model.ground_truth", such a field of one."""
    if key in columns:
        return True
    name, dot, rest = key.partition(".")
    inner = columns.get(name) if dot else None
    return isinstance(inner, Mapping) and has(inner, rest)


def value_at(columns: Mapping[str, Any], key: str) -> Any:
    """The value there; raises KeyError unless `has`."""
    if key in columns:
        return columns[key]
    name, _, rest = key.partition(".")
    return value_at(columns[name], rest)


def value_or_none(columns: Mapping[str, Any], key: str) -> Any:
    """The value there; None unless `has`."""
    return value_at(columns, key) if has(columns, key) else None


def require_column(rows: Sequence[Row], key: str, section_key: str) -> None:
    """Raise ValueError, naming the columns there are, unless every row has the column.

    Args:
        key: name of the column.
        section_key: the configuration key that names it, such as "data.prompt_key".
    """
    for row in rows:
        if not has(row.columns, key):
            columns = ", ".join(str(name) for name in row.columns)
            raise ValueError(f"{section_key} = '{key}': no such column in {row.source}; columns: {columns}")


def no_rows(name: str, what: str) -> ValueError:
    return ValueError(f"{what}: '{name}' holds no rows")


def parse(line: bytes, source: str, what: str) -> dict[str, Any]:
    """A line of a jsonl file as columns; raises ValueError, naming it, for anything else."""
    try:
        columns = json.loads(line)
    except ValueError as e:  # malformed JSON or bytes that are not UTF-8
        raise ValueError(f"{what}: {source} is not JSON: {e}") from e
    except RecursionError as e:
        raise ValueError(f"{what}: {source} is nested too deeply") from e
    if not isinstance(columns, dict):
        raise ValueError(f"{what}: {source} must be an object of columns, not {type(columns).__name__}")
    return columns


def parquet_batches(file: DataFile, what: str) -> Iterator[pyarrow.RecordBatch]:
    """A parquet file's rows, `BATCH_ROWS` at a time; raises ValueError for a file that is none."""
    import pyarrow
    from pyarrow import parquet

    try:
        with file.open() as f, parquet.ParquetFile(f, pre_buffer=False, buffer_size=2**20) as opened:
            yield from opened.iter_batches(batch_size=BATCH_ROWS, use_threads=False)
    except (pyarrow.ArrowException, OSError) as e:
        raise ValueError(f"{what}: '{file.name}' is not a readable parquet file: {' '.join(str(e).split())}") from e


def lines_of(file: DataFile) -> BinaryIO:
    """For reading line by line, which what a store gives cannot do by itself; raises as `DataFile.open`."""
    opened = file.open()
    return io.BufferedReader(cast(io.RawIOBase, opened), REMOTE_BLOCK) if file.remote else opened


def rows_of_file(file: DataFile, what: str) -> Iterator[Row]:
    """Its rows, one after the other; raises ValueError for a file that is malformed."""
    if file.kind == "parquet":
        rows = (columns for batch in parquet_batches(file, what) for columns in batch.to_pylist())
        yield from (Row(f"{file.name} row {number}", columns) for number, columns in enumerate(rows, start=1))
        return
    try:
        with lines_of(file) as f:
            for number, line in enumerate(f, start=1):
                if line.strip():
                    yield Row(f"{file.name}:{number}", parse(line, f"{file.name}:{number}", what))
    except OSError as e:
        raise ValueError(f"{what}: '{file.name}' cannot be read: {e.strerror or e}") from e
