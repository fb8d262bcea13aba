"""A folder that an evaluation fills: made for it, and never used twice. Torch-free.

eval.json        estimates per data source, and how they came about
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
    """A folder that `megarl eval` has filled.

    Attributes:
        settings: how the responses were sampled.
    """

    folder: str
    settings: Mapping[str, Any]
    records: Sequence[Record]

    @property
    def name(self) -> str:
        """The folder's."""
        return os.path.basename(os.path.abspath(self.folder))


def check_unused(folder: str) -> None:
    """Raises ValueError if a folder holds something, or is none."""
    try:
        if os.path.lexists(folder) and os.listdir(folder):
            raise ValueError(f"'{folder}' holds something already, and nothing is overwritten: name a new folder")
    except OSError as e:
        raise ValueError(f"'{folder}' cannot be filled: {e.strerror}; name a folder with --out") from e


def new_folder(wanted: str, *, exact: bool) -> str:
    """Make a folder: the wanted one, or wanted-2, wanted-3 ... if it is used.

    Args:
        exact: none but the wanted one.

    Raises:
        ValueError: it holds something, or no folder can be made there.
    """
    names = itertools.chain([wanted], (f"{wanted}-{i}" for i in itertools.count(2)))
    try:
        if exact:
            check_unused(wanted)
            os.makedirs(wanted, 0o700, exist_ok=True)
            return wanted
        os.makedirs(os.path.dirname(os.path.abspath(wanted)), exist_ok=True)
        for name in names:
            with suppress(FileExistsError):  # two that begin at once get a folder each
                os.mkdir(name, 0o700)
                return name
    except OSError as e:
        raise ValueError(f"'{wanted}' cannot be made: {e.strerror}; name a folder with --out") from e
    raise AssertionError("there is no end to the names")


def remove_unused(folder: str) -> None:
    """Delete a folder of an evaluation that came to nothing."""
    with suppress(OSError):
        if {*os.listdir(folder)} <= {CONFIG_FILE, "lock"}:
            for name in os.listdir(folder):
                os.unlink(os.path.join(folder, name))
            os.rmdir(folder)


def is_finished(folder: str) -> bool:
    """Whether an evaluation has filled it."""
    return os.path.isfile(os.path.join(folder, EVAL_FILE))


def write_evaluation(
    folder: str, settings: Mapping[str, Any], records: Sequence[Record], summaries: Sequence[Summary]
) -> None:
    """Both files, eval.json last: where it is, all is."""
    write_records(os.path.join(folder, SAMPLES_FILE), records)
    *named, overall = summaries
    sources = {summary.source: as_json(summary) for summary in named}
    write_json(os.path.join(folder, EVAL_FILE), {**settings, "all": as_json(overall), "sources": sources})


def read_evaluation(folder: str) -> Finished:
    """Raises ValueError if the folder is not what `write_evaluation` leaves."""
    file = os.path.join(folder, EVAL_FILE)
    try:
        with open(file, encoding="utf-8") as f:
            values = json.load(f)
    except (OSError, ValueError, RecursionError) as e:
        raise ValueError(f"'{file}' is not what megarl eval writes ({type(e).__name__}); evaluate again") from e
    if not isinstance(values, dict):
        raise ValueError(f"'{file}' is not what megarl eval writes; evaluate again")
    settings = {name: value for name, value in values.items() if name not in ("all", "sources")}
    return Finished(folder=folder, settings=settings, records=read_records(os.path.join(folder, SAMPLES_FILE)))


def write_json(path: str, values: Mapping[str, Any]) -> None:
    """Indented, for people."""
    write_whole(path, lambda f: f.writelines([json.dumps(values, indent=1, ensure_ascii=False), "\n"]))
