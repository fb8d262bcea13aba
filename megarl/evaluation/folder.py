"""Makes, writes and reads the folder of an evaluation, which is new or empty at its start. Torch-free.

eval.json        estimates per data source, and the settings of the evaluation
samples.jsonl    every response with its score
config.yaml      the resolved configuration
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from megarl.config.load import CONFIG_FILE
from megarl.evaluation.records import SAMPLES_FILE, Record, read_records, write_records, write_whole
from megarl.evaluation.summary import Summary, as_json

EVAL_FILE = "eval.json"


@dataclass(frozen=True, kw_only=True)
class Finished:
    """Holds a finished evaluation.

    Attributes:
        settings: how the responses were sampled.
    """

    folder: str
    settings: Mapping[str, Any]
    records: Sequence[Record]

    @property
    def name(self) -> str:
        """Return the folder's name."""
        return os.path.basename(os.path.abspath(self.folder))


def check_unused(folder: str) -> None:
    """Raise ValueError if a path exists and is not an empty folder."""
    try:
        if os.path.lexists(folder) and os.listdir(folder):
            raise ValueError(f"'{folder}' holds something already, and nothing is overwritten: name a new folder")
    except OSError as e:
        raise ValueError(f"'{folder}' cannot be filled: {e.strerror}; name a folder with --out") from e


def new_folder(path: str, *, exact: bool) -> str:
    """Make the folder `path`, or PATH-2, PATH-3 ... if that exists; returns its path.

    Args:
        exact: allow only `path`, which may exist and be empty.

    Raises:
        ValueError: the folder is not empty, or cannot be made.
    """
    names = itertools.chain([path], (f"{path}-{i}" for i in itertools.count(2)))
    try:
        if exact:
            check_unused(path)
            os.makedirs(path, 0o700, exist_ok=True)
            return path
        os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
        for name in names:
            with suppress(FileExistsError):  # processes that start at the same time get different folders
                os.mkdir(name, 0o700)
                return name
    except OSError as e:
        raise ValueError(f"'{path}' cannot be made: {e.strerror}; name a folder with --out") from e
    raise AssertionError("unreachable: the names do not end")


def remove_unused(folder: str) -> None:
    """Delete the folder of an evaluation that failed before it wrote results."""
    with suppress(OSError):
        if {*os.listdir(folder)} <= {CONFIG_FILE, "lock"}:
            for name in os.listdir(folder):
                os.unlink(os.path.join(folder, name))
            os.rmdir(folder)


def is_finished(folder: str) -> bool:
    """Tell whether a folder holds a finished evaluation."""
    return os.path.isfile(os.path.join(folder, EVAL_FILE))


def write_evaluation(
    folder: str, settings: Mapping[str, Any], records: Sequence[Record], summaries: Sequence[Summary]
) -> None:
    """Write samples.jsonl, then eval.json, whose existence means that the evaluation is finished."""
    write_records(os.path.join(folder, SAMPLES_FILE), records)
    *named, overall = summaries
    sources = {summary.source: as_json(summary) for summary in named}
    write_json(os.path.join(folder, EVAL_FILE), {**settings, "all": as_json(overall), "sources": sources})


def read_evaluation(folder: str) -> Finished:
    """Read a finished evaluation. Raises ValueError for files that `write_evaluation` did not write."""
    file = os.path.join(folder, EVAL_FILE)
    try:
        with open(file, encoding="utf-8") as f:
            values = json.load(f)
    except (OSError, ValueError, RecursionError) as e:
        raise ValueError(f"'{file}' is not what megarl eval writes ({type(e).__name__}); evaluate again") from e
    if not isinstance(values, dict) or not {"all", "sources"} <= values.keys():
        raise ValueError(f"'{file}' is not what megarl eval writes; evaluate again")
    settings = {name: value for name, value in values.items() if name not in ("all", "sources")}
    return Finished(folder=folder, settings=settings, records=read_records(os.path.join(folder, SAMPLES_FILE)))


def write_json(path: str, values: Mapping[str, Any]) -> None:
    """Write values as indented JSON for people."""
    write_whole(path, lambda f: f.writelines([json.dumps(values, indent=1, ensure_ascii=False), "\n"]))
