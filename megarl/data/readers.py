"""Rows of jsonl and parquet files."""

from __future__ import annotations

import glob
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple


class Row(NamedTuple):
    """One row of a file.

    Attributes:
        source: where it is, counted from 1: "train.jsonl:17", "train.parquet row 17".
        columns: values by the columns' names.
    """

    source: str
    columns: Mapping[str, Any]


def read_rows(patterns: Sequence[str], what: str) -> list[Row]:
    """All rows of the files that the patterns match: patterns as given, the files of one pattern sorted by name.

    Args:
        patterns: paths or globs of .jsonl and .parquet files; a file that two patterns match is read once.
        what: the configuration key that they come from, for messages.

    Raises:
        ValueError: no pattern, a pattern without a file, an unknown extension, an empty or malformed file.
    """
    if not patterns:
        raise ValueError(f"{what} is empty: name at least one .jsonl or .parquet file")
    paths: dict[str, None] = {}
    for pattern in patterns:
        matches = _matches(pattern)
        if not matches:
            raise ValueError(f"{what}: no file matches '{pattern}'")
        paths.update(dict.fromkeys(matches))
    rows: list[Row] = []
    for path in paths:
        before = len(rows)
        rows.extend(_read_file(path, what))
        if len(rows) == before:
            raise ValueError(f"{what}: '{path}' holds no rows")
    return rows


def require_column(rows: Sequence[Row], key: str, section_key: str) -> None:
    """Raise ValueError, naming the columns there are, unless every row has the column.

    Args:
        key: name of the column.
        section_key: the configuration key that names it, such as "data.prompt_key".
    """
    for row in rows:
        if key not in row.columns:
            columns = ", ".join(str(name) for name in row.columns)
            raise ValueError(f"{section_key} = '{key}': no such column in {row.source}; columns: {columns}")


def _matches(pattern: str) -> list[str]:
    try:
        return sorted(glob.glob(pattern, recursive=True))
    except (OSError, ValueError):  # a NUL byte, a name that the file system cannot hold
        return []


def _read_file(path: str, what: str) -> Iterator[Row]:
    extension = os.path.splitext(path)[1]
    if extension == ".jsonl":
        return _read_jsonl(path, what)
    if extension == ".parquet":
        return _read_parquet(path, what)
    raise ValueError(f"{what}: '{path}' is neither .jsonl nor .parquet")


def _read_jsonl(path: str, what: str) -> Iterator[Row]:
    try:
        with open(path, "rb") as f:
            for number, line in enumerate(f, start=1):
                if line.strip():
                    yield Row(f"{path}:{number}", _parse(line, f"{path}:{number}", what))
    except OSError as e:  # a directory, a link to nothing, no permission
        raise ValueError(f"{what}: '{path}' cannot be read: {e.strerror}") from e


def _parse(line: bytes, source: str, what: str) -> dict[str, Any]:
    try:
        columns = json.loads(line)
    except ValueError as e:  # malformed JSON or bytes that are not UTF-8
        raise ValueError(f"{what}: {source} is not JSON: {e}") from e
    except RecursionError as e:
        raise ValueError(f"{what}: {source} is nested too deeply") from e
    if not isinstance(columns, dict):
        raise ValueError(f"{what}: {source} must be an object of columns, not {type(columns).__name__}")
    return columns


def _read_parquet(path: str, what: str) -> Iterator[Row]:
    import pyarrow
    from pyarrow import parquet

    try:
        for number, columns in enumerate(parquet.read_table(path).to_pylist(), start=1):
            yield Row(f"{path} row {number}", columns)
    except (pyarrow.ArrowException, OSError) as e:
        raise ValueError(f"{what}: '{path}' is not a readable parquet file: {' '.join(str(e).split())}") from e
