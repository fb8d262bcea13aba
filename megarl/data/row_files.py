"""Reads single rows of the files of an index. Torch-free."""

from __future__ import annotations

import os
import zlib
from collections.abc import Mapping
from typing import Any, Protocol

from megarl.data.files import row_prefix
from megarl.data.readers import BATCH_ROWS, parse
from megarl.data.scan import checks_of, digest_of


class RowsChanged(RuntimeError):
    """Raised where a file of rows is no longer what it was when its rows were looked at."""


class RowRefused(ValueError):
    """Raised, on every rank alike, for rows that were looked at before the run and cannot be used when drawn."""


class RowFile(Protocol):
    """Reads single rows of an open file."""

    def read(self, fields: Any) -> tuple[str, Mapping[str, Any]]:
        """Read the source and columns of a row, by its `scan.FIELDS`."""


def open_file(name: str, entry: int, kind: str, path: Any) -> RowFile:
    """Open one of `Index.files`; raises RowsChanged if it is gone."""
    if kind == "arrow":
        return ArrowFile(name, path)
    try:
        return JsonlFile(name, path)
    except OSError as e:
        raise RowsChanged(f"{name} can no longer be read: {e.strerror or e}; put it back and start again") from e


def check_fields(fields: Any, tokens: Any, folder: str) -> None:
    """Raise RowsChanged if what the index says of a row is not what was written.

    Args:
        fields: `scan.FIELDS` of the row.
        tokens: int32, those that are stored for it.
        folder: of the index.
    """
    if int(checks_of(fields.reshape(1))[0]) ^ zlib.crc32(tokens.tobytes()) != int(fields["check"]):
        raise RowsChanged(f"'{folder}' is no longer what was written there; remove it and start again to go on")


class JsonlFile:
    """Reads lines of a file, or of its bytes in memory, by their places, and compares each with what it was."""

    def __init__(self, name: str, source: str | bytes) -> None:
        self._name, self._prefix, self._source = name, row_prefix(name), source
        if isinstance(source, str):
            self._descriptor = os.open(source, os.O_RDONLY)  # a file that is put in its place later is another one

    def __del__(self) -> None:
        if hasattr(self, "_descriptor"):
            os.close(self._descriptor)

    def read(self, fields: Any) -> tuple[str, Mapping[str, Any]]:
        source, size, at = f"{self._prefix}{fields['line']}", int(fields["size"]), int(fields["at"])
        content = self._source
        try:
            line = content[at : at + size] if isinstance(content, bytes) else os.pread(self._descriptor, size, at)
        except OSError as e:
            raise RowsChanged(
                f"{source} can no longer be read: {e.strerror or e}; put the file back and start again to go on"
            ) from e
        try:
            columns = parse(line, source, "data")
        except ValueError:
            columns = {}
        if digest_of(columns) != int(fields["row"]):
            raise RowsChanged(
                f"{source} is no longer what it was when the run began; put the file back and start again to go on"
            )
        return source, columns


class ArrowFile:
    """Reads rows of an Arrow file that is mapped into memory, or held there, and compares each with what it was."""

    def __init__(self, name: str, source: Any) -> None:
        import pyarrow

        self._name, self._changed = name, f"the copy of it in '{source}' is no longer what was written there"
        try:
            self._opened = pyarrow.ipc.open_file(pyarrow.memory_map(source) if isinstance(source, str) else source)
        except (pyarrow.ArrowException, OSError) as e:
            raise self._refusal(name) from e

    def read(self, fields: Any) -> tuple[str, Mapping[str, Any]]:
        import pyarrow

        source = f"{self._name} row {fields['line']}"
        batch, place = divmod(int(fields["at"]), BATCH_ROWS)
        try:
            row = self._opened.get_batch(batch).slice(place, 1)
            row.validate(full=True)  # places of texts that are outside of the file would be read
            (columns,) = row.to_pylist()
        except (pyarrow.ArrowException, OSError, ValueError) as e:
            raise self._refusal(source) from e
        if digest_of(columns) != int(fields["row"]):
            raise self._refusal(source)
        return source, columns

    def _refusal(self, source: str) -> RowsChanged:
        return RowsChanged(f"{source}: {self._changed}; remove its folder and start again to go on")
