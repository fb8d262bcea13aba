"""Reads rows of files. Torch-free."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from megarl.data.arrow_batches import arrow_batches
from megarl.data.files import DataFile, data_files, row_prefix
from megarl.data.json_lines import buffered, json_lines
from megarl.data.parquet_pages import MOST_BYTES, MOST_TIMES, rows_at_a_time
from megarl.rewards.rows import answer_hint, column_names

if TYPE_CHECKING:
    import pyarrow

_NESTED = 100  # levels of a row
BATCH_ROWS = 1024
"""Rows of a table that are Python objects at a time."""


class Row(NamedTuple):
    """Holds a row of a file.

    Attributes:
        source: where it is, counted from 1: "train.jsonl:17", "train.parquet row 17".
        columns: values by the columns' names.
    """

    source: str
    columns: Mapping[str, Any]


def iterate_rows(patterns: Sequence[str], what: str) -> Iterator[Row]:
    """Yield the rows of the files that the patterns match, in the order of `data_files`.

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
    """Tell whether columns have a column of that name, or, for "reward_model.ground_truth", such a field of one."""
    if key in columns:
        return True
    name, dot, rest = key.partition(".")
    inner = columns.get(name) if dot else None
    return isinstance(inner, Mapping) and has(inner, rest)


def value_at(columns: Mapping[str, Any], key: str) -> Any:
    """Return the value of a column, or of a field of one; raises KeyError unless `has`."""
    if key in columns:
        return columns[key]
    name, _, rest = key.partition(".")
    return value_at(columns[name], rest)


def value_or_none(columns: Mapping[str, Any], key: str) -> Any:
    """Return the value of a column, or of a field of one; None unless `has`."""
    return value_at(columns, key) if has(columns, key) else None


def require_column(rows: Sequence[Row], key: str, section_key: str) -> None:
    """Raise ValueError, naming the columns there are, unless every row has the column.

    Args:
        key: name of the column.
        section_key: the configuration key that names it, such as "data.prompt_key".
    """
    for row in rows:
        if not has(row.columns, key):
            columns = ", ".join(column_names(row.columns))
            hint = answer_hint(row.columns) if section_key == "data.answer_key" else ""
            raise ValueError(f"{section_key} = '{key}': no such column in {row.source}; columns: {columns}{hint}")


def no_rows(name: str, what: str) -> ValueError:
    return ValueError(f"{what}: '{name}' holds no rows")


def parse(line: bytes, source: str, what: str) -> dict[str, Any]:
    """Read a line of a jsonl file as columns; raises ValueError, naming it, for anything else."""
    try:
        columns = json.loads(line)
    except ValueError as e:  # malformed JSON or bytes that are not UTF-8
        raise ValueError(f"{what}: {source} is not JSON: {e}") from e
    except RecursionError as e:
        raise ValueError(f"{what}: {source} is nested too deeply") from e
    if line.count(b"[") + line.count(b"{") > _NESTED and _deeper(columns, _NESTED):
        raise ValueError(f"{what}: {source} is nested more than {_NESTED} deep")
    if b"\\u" in line and re.search(rb"\\ud[89a-f]", line, re.IGNORECASE):
        try:
            json.dumps(columns, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise ValueError(f"{what}: {source} holds half of a surrogate pair, which is no text") from None
    if not isinstance(columns, dict):
        raise ValueError(f"{what}: {source} must be an object of columns, not {type(columns).__name__}")
    return columns


def _deeper(value: Any, levels: int) -> bool:
    """Tell whether a value of JSON is nested more deeply than `levels`."""
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return levels == 0 or any(isinstance(part, list | dict) and _deeper(part, levels - 1) for part in parts)


def is_table(file: DataFile) -> bool:
    """Tell whether the columns of a file have types; else it is a file of text."""
    return file.kind in ("parquet", "arrow")


def table_batches(file: DataFile, what: str) -> Iterator[pyarrow.RecordBatch]:
    """Yield a table's rows, at most `BATCH_ROWS` at a time; raises ValueError for a file that is malformed."""
    return arrow_batches(file, what, BATCH_ROWS) if file.kind == "arrow" else _parquet_batches(file, what)


def _parquet_batches(file: DataFile, what: str) -> Iterator[pyarrow.RecordBatch]:
    """Yield a parquet file's rows without dictionaries, `BATCH_ROWS` at a time, or fewer where these could be large.

    Raises:
        ValueError: the file is no parquet file, or its rows come to far more bytes than it has.
    """
    import pyarrow
    from pyarrow import parquet

    read = 0
    try:
        with (
            file.open() as f,
            buffered(file, 2**14) as headers,
            parquet.ParquetFile(f, pre_buffer=False, buffer_size=2**20) as opened,
        ):
            for i in range(opened.num_row_groups):
                rows = rows_at_a_time(headers, opened.metadata.row_group(i), BATCH_ROWS, whole=not file.remote)
                for batch in opened.iter_batches(batch_size=rows, row_groups=[i], use_threads=False):
                    plain = _plain(batch)
                    read += plain.nbytes
                    if read > (most := max(MOST_BYTES, MOST_TIMES * file.size)):
                        raise ValueError(f"its {file.size} bytes come to rows of more than {most}")
                    yield plain
    except (pyarrow.ArrowException, OSError, ValueError) as e:
        raise ValueError(f"{what}: '{file.name}' is not a readable parquet file: {' '.join(str(e).split())}") from e


def _plain(batch: pyarrow.RecordBatch) -> pyarrow.RecordBatch:
    """Decode the dictionaries of a batch, which an Arrow file could not change between its batches."""
    import pyarrow

    columns = [c.dictionary_decode() if pyarrow.types.is_dictionary(c.type) else c for c in batch.columns]
    return pyarrow.RecordBatch.from_arrays(columns, names=batch.schema.names)


def rows_of_file(file: DataFile, what: str) -> Iterator[Row]:
    """Yield the rows of a file, one after the other; raises ValueError for a file that is malformed."""
    if is_table(file):
        rows = (columns for batch in table_batches(file, what) for columns in batch.to_pylist())
        yield from (Row(f"{file.name} row {number}", columns) for number, columns in enumerate(rows, start=1))
        return
    prefix = row_prefix(file.name)
    for number, line in enumerate(json_lines(file, what), start=1):
        if line.strip():
            yield Row(source := f"{prefix}{number}", parse(line, source, what))
