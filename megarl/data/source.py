"""Reads rows that a user's code gives. Torch-free."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from megarl.own_code import in_a_line
from megarl.registry import Registry

_SOURCES: Registry[Callable[[], Any]] = Registry("data.source", "function")


def source_version(name: str) -> str:
    """Return the attribute `version` of what `data.source` names; raises ValueError if there is no such thing."""
    return str(getattr(_SOURCES.load(name), "version", ""))


def spool(name: str, path: Path, what: str, progress: Callable[[], None]) -> None:
    """Write the rows of `data.source` to a jsonl file, one after the other.

    Raises:
        ValueError: the code fails, or gives what is no mapping or cannot be written as JSON; names the row.
        OSError: the file cannot be written.
    """
    rows, number = _rows(name), 0
    with open(path, "w", encoding="utf-8") as f:
        while True:
            try:
                row = next(rows)
            except StopIteration:
                return
            except (Exception, SystemExit) as e:  # a user's code fails as it likes
                raise ValueError(f"{what} = {name} failed after {number} rows: {in_a_line(e)}") from e
            number += 1
            f.write(_line(row, f"{name}:{number}", what) + "\n")
            if number % 10_000 == 0:
                progress()


def _rows(name: str) -> Iterator[Any]:
    """Yield the rows of `data.source`, so that what the user's code raises comes out of `next`."""
    given = _SOURCES.load(name)()
    if hasattr(given, "__len__") and hasattr(given, "__getitem__"):
        yield from (given[i] for i in range(len(given)))
    elif isinstance(given, Iterable):
        yield from given
    else:
        raise TypeError(f"it gives {type(given).__name__}, no rows")


def _line(row: Any, source: str, what: str) -> str:
    if not isinstance(row, Mapping):
        raise ValueError(f"{what}: {source} must be a mapping of columns, not {type(row).__name__}")
    try:
        return json.dumps(dict(row))
    except (TypeError, ValueError) as e:
        raise ValueError(f"{what}: {source} cannot be written as JSON: {e}") from e
