"""Single rows of the files that an index speaks of. Torch-free."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Protocol

from megarl.data.readers import BATCH_ROWS, parse
from megarl.data.scan import digest_of


class RowsChanged(RuntimeError):
    """A file of rows is no longer what it was when its rows were looked at."""


class RowFile(Protocol):
    """A file that is open for single rows."""

    def read(self, fields: Any) -> tuple[str, Mapping[str, Any]]:
        """Source and columns of a row, by its `scan.FIELDS`."""


def open_file(name: str, entry: int, kind: str, path: Any) -> RowFile:
    """One of `Index.files`; raises RowsChanged if it is gone."""
    try:
        return ArrowFile(name, path) if kind == "arrow" else JsonlFile(name, path)
    except OSError as e:
        raise RowsChanged(f"{name} can no longer be read: {e.strerror or e}; put it back and start again") from e


class JsonlFile:
    """Lines by their bytes, each compared with what it was."""

    def __init__(self, name: str, path: str) -> None:
        self._name = name
        self._descriptor = os.open(path, os.O_RDONLY)  # a file that is put in its place later is another one

    def __del__(self) -> None:
        if hasattr(self, "_descriptor"):
            os.close(self._descriptor)

    def read(self, fields: Any) -> tuple[str, Mapping[str, Any]]:
        source = f"{self._name}:{fields['line']}"
        line = os.pread(self._descriptor, int(fields["size"]), int(fields["at"]))
        if digest_of(line) != int(fields["row"]):
            raise RowsChanged(
                f"{source} is no longer what it was when the run began; put the file back and start again to go on"
            )
        return source, parse(line, source, "data")


class ArrowFile:
    """Rows of an Arrow file that is mapped into memory, or held there."""

    def __init__(self, name: str, source: Any) -> None:
        import pyarrow

        self._name = name
        self._opened = pyarrow.ipc.open_file(pyarrow.memory_map(source) if isinstance(source, str) else source)

    def read(self, fields: Any) -> tuple[str, Mapping[str, Any]]:
        batch, place = divmod(int(fields["at"]), BATCH_ROWS)
        (columns,) = self._opened.get_batch(batch).slice(place, 1).to_pylist()
        return f"{self._name} row {fields['line']}", columns
