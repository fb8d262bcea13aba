"""Writes the few rows of a rehearsal: short ones of the run's own files, or stand-ins for files that are not here."""

from __future__ import annotations

import json
import os
import re
from collections import defaultdict
from collections.abc import Sequence
from itertools import islice
from typing import Any

from megarl.config import Config
from megarl.data.files import stem_of
from megarl.data.readers import iterate_rows
from megarl.rehearsal.stand_ins import absent, rows_of

LOOKED_AT = 1000
"""Rows of an entry, of which the shortest are taken."""


def write_rows(
    config: Config, entries: Sequence[str], what: str, folder: str, count: int, *, demonstrations: bool = False
) -> tuple[list[str], list[str]]:
    """Write rows for each entry of a key that names files of rows.

    Args:
        what: the key, such as "data.train_files".
        count: rows for each entry.
        demonstrations: whether a warm-up reads them.

    Returns:
        the new entries, folders in the same order; and the old ones that are not here.

    Raises:
        ValueError: a file is here and cannot be read.
    """
    folders, missing = [], []
    for number, entry in enumerate(entries):
        folders.append(os.path.join(folder, what, str(number)))
        os.makedirs(folders[-1])
        if absent(entry):
            missing.append(entry)
            files = {"rows": rows_of(config, count, demonstrations=demonstrations)}
        else:
            files = _shortest(entry, what, count)
        for stem, rows in files.items():
            with open(os.path.join(folders[-1], f"{stem}.jsonl"), "w", encoding="utf-8") as f:
                f.writelines(json.dumps(row, default=str) + "\n" for row in rows)
    return folders, missing


def _shortest(entry: str, what: str, count: int) -> dict[str, list[Any]]:
    """Read the shortest of an entry's first rows, by the stems of their files, which are names of data sources."""
    rows = sorted(islice(iterate_rows([entry], what), LOOKED_AT), key=lambda row: len(str(row.columns)))
    by_stem: dict[str, list[Any]] = defaultdict(list)
    for row in rows[:count]:
        name = re.sub(r"(?::| row )\d+$", "", row.source)
        by_stem[stem_of(name)].append(dict(row.columns))
    return by_stem
