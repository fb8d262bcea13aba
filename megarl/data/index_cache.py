"""Gives the index of some files: from memory if they are small, from the cache otherwise."""

from __future__ import annotations

import json
import os
from pathlib import Path

from megarl.data.files import DataFile
from megarl.data.index_making import TooLarge, make_index
from megarl.data.row_cache import Progress, cache_folder, entry, meta_of
from megarl.data.row_index import Index, meta_of_index, open_index
from megarl.data.scan import Scan, hexadecimal
from megarl.data.tokenizer import Tokenizer

_FORMAT = 5  # of an index: those of another one are made again


def index_of(
    sources: list[DataFile], scan: Scan, tokenizer: Tokenizer, *, tokenizer_key: str, small_bytes: int
) -> Index:
    """Return the index of some files, or of `data.source` where there are none.

    Args:
        tokenizer_key: tells tokenizers apart: without it, nothing that depends on one is kept.
        small_bytes: files up to this size together are read by every process for itself.

    Raises:
        ValueError: unreadable files, a row that cannot be used, a cache that cannot be written.
    """
    is_remote = any(file.remote for file in sources)
    small = bool(sources) and not is_remote and sum(file.size for file in sources) <= small_bytes
    if tokenizer_key and not small:
        return _cached(sources, scan, tokenizer, tokenizer_key)
    if not small and (not sources or (is_remote and scan.read_again)):
        raise ValueError(f"{scan.what}: rows that have to be kept need a tokenizer that is known by its files")
    try:
        return make_index(sources, scan, tokenizer, None, lambda: None)
    except TooLarge:
        if not tokenizer_key:
            raise
        return _cached(sources, scan, tokenizer, tokenizer_key)


def _cached(sources: list[DataFile], scan: Scan, tokenizer: Tokenizer, tokenizer_key: str) -> Index:
    """Open the index in the cache; make it first if it is not there."""

    def make(folder: Path, progress: Progress) -> dict[str, object]:
        return meta_of_index(make_index(sources, scan, tokenizer, folder, progress))

    folder = entry(cache_folder(scan.data.cache_dir), _key(sources, scan, tokenizer_key), scan.what, make)
    try:
        return open_index(folder, meta_of(folder))
    except OSError as e:
        raise ValueError(f"{scan.what}: '{folder}' cannot be read: {e.strerror or e}; remove it") from e


def _key(sources: list[DataFile], scan: Scan, tokenizer_key: str) -> str:
    """Hash everything that an index depends on."""
    parts = [
        [_FORMAT, scan.what, scan.scorers, tokenizer_key],
        [[f.place if f.remote else os.path.abspath(f.place), f.entry, f.size, f.changed] for f in sources],
        *scan.settings,
    ]
    return hexadecimal(json.dumps(parts).encode())
