"""Holds the index of the rows of some files: where each lies, in order, and the tokens of rows that were tokenised.

An index is a folder, or is held in memory if it is small:

    rows.bin       `scan.FIELDS` of every row that is used, in the order of the files
    tokens.bin     int32: token ids of the prompts, or of the examples, that were tokenised on the way
    N.jsonl        the rows of file N, where they were fetched from a store or come from `data.source`; and of a file of
                   text that is packed or has no lines of JSON, so that single rows can be read
    N.arrow        the same of a table

Examples that were tokenised are read from tokens.bin alone, so that their index keeps no N.jsonl and N.arrow.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from megarl.data.row_files import RowsChanged, check_fields
from megarl.data.scan import FIELDS


class StoredTokens:
    """Reads int32s of a file as they are asked for: mapped, the pages of all that were drawn would stay in memory."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._descriptor = os.open(path, os.O_RDONLY)
        self._count = os.fstat(self._descriptor).st_size // 4

    def __del__(self) -> None:
        if hasattr(self, "_descriptor"):
            os.close(self._descriptor)

    def __getitem__(self, part: slice) -> Any:
        start, stop, _ = part.indices(self._count)
        try:
            raw = os.pread(self._descriptor, 4 * max(0, stop - start), 4 * start)
        except OSError as e:
            raise RowsChanged(f"'{self._path}' can no longer be read: {e.strerror or e}; start again to go on") from e
        return np.frombuffer(raw[: len(raw) // 4 * 4], "<i4")


@dataclass(kw_only=True)
class Index:
    """Holds the rows of some files, and what is known of them.

    Attributes:
        rows: `scan.FIELDS`, of those that are used.
        tokens: int32, what `tokens_at` points into: an array, or `StoredTokens`.
        files: what `file` counts: name, entry of the list, kind, and path; or the bytes of a small one.
        seen: rows of the files.
        filtered, overlong, duplicates: of these, what was left out.
        special: rows whose texts spell special tokens.
        same: pairs whose answers are the same.
        sources: data sources of the rows.
        digest: of the rows and of what makes prompts of them, in order.
        folder: where it lies; empty: in memory.
    """

    rows: Any
    tokens: Any
    files: list[tuple[str, int, str, Any]] = field(default_factory=list)
    seen: int = 0
    filtered: int = 0
    overlong: int = 0
    duplicates: int = 0
    special: int = 0
    same: int = 0
    sources: set[str] = field(default_factory=set)
    digest: str = ""
    folder: str = ""

    @property
    def counts(self) -> dict[str, int]:
        names = ("seen", "filtered", "overlong", "duplicates", "special", "same")
        return {name: getattr(self, name) for name in names}

    def stored(self, fields: Any) -> Any:
        """Return the int32s that are stored for a row, which is `rows` at a place; none if there are none.

        Raises:
            RowsChanged: they, or what is known of the row, are not what was written.
        """
        at = int(fields["tokens_at"])
        tokens = self.tokens[at : at + int(fields["tokens"])] if at >= 0 else self.tokens[:0]
        check_fields(fields, tokens, self.folder)
        return tokens

    def in_common(self, other: Index) -> int:
        """Count the rows whose prompt, or what stands for their sequences, the other index has too."""
        prompts, step = np.unique(self.rows["prompt"]), 2**16
        there = np.zeros(len(prompts), bool)
        for i in range(0, len(other.rows), step):
            block = other.rows["prompt"][i : i + step]
            place = np.minimum(np.searchsorted(prompts, block), len(prompts) - 1)
            there[place[prompts[place] == block]] = True
        return int(np.isin(self.rows["prompt"], prompts[there]).sum())


def open_index(folder: Path, meta: dict[str, Any]) -> Index:
    """Map an index that `make_index` wrote into memory."""
    files = [
        (name, entry, kind, path if os.path.isabs(path) else str(folder / path))
        for name, entry, kind, path in meta["files"]
    ]
    return Index(
        rows=mapped(str(folder / "rows.bin"), FIELDS),
        tokens=StoredTokens(str(folder / "tokens.bin")),
        files=files,
        digest=meta["digest"],
        folder=str(folder),
        sources=set(meta["sources"]),
        **meta["counts"],
    )


def meta_of_index(index: Index) -> dict[str, object]:
    """Return what `open_index` needs to know beside the files."""
    return {"files": index.files, "counts": index.counts, "digest": index.digest, "sources": sorted(index.sources)}


def mapped(path: str, dtype: np.dtype[Any]) -> Any:
    """Map a file as an array; an empty file, which cannot be mapped, is an empty array."""
    return np.memmap(path, dtype, "r") if os.path.getsize(path) else np.zeros(0, dtype)
