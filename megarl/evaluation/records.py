"""Writes and reads a file of scored responses to held-out prompts, one a line. Torch-free."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from typing import IO, Any

from megarl.telemetry.lines import no_link

SAMPLES_FILE = "samples.jsonl"
_LARGEST = 1e100  # absolute score: sums of squares must stay finite


@dataclass(frozen=True, kw_only=True)
class Record:
    """Holds a scored response.

    Attributes:
        index: the prompt's position in its files.
        sample: the response's number among the prompt's responses.
        source: the prompt's data source.
        prompt, response: texts, the prompt as the model got it.
        row: digest of the prompt in the data, before a chat template.
        answer: the reference answer; empty if the row has none.
        vote: the response's answer, which maj@k counts; None: the response gives none.
        score: the score; None: scoring failed.
        finish: "stop", or "length" for a response that was cut off.
        tokens: tokens of the response.
    """

    index: int
    sample: int
    source: str
    row: str
    prompt: str
    response: str
    answer: str
    vote: str | None
    score: float | None
    finish: str
    tokens: int

    @property
    def right(self) -> bool:
        """Tell whether the score is 1 or more."""
        return self.score is not None and self.score >= 1.0


def write_records(path: str, records: Iterable[Record]) -> None:
    """Write records, one JSON object a line. The file gets its name when it is whole."""

    def write(f: IO[str]) -> None:
        for record in records:
            f.write(json.dumps(asdict(record), ensure_ascii=False) + "\n")

    write_whole(path, write)


def read_records(path: str) -> list[Record]:
    """Read a file of `write_records`. Raises ValueError, naming file and line, for any other content."""
    names, records = {field.name for field in fields(Record)}, []
    try:
        with open(path, encoding="utf-8") as f:
            for number, line in enumerate(f, start=1):
                try:
                    values: Any = json.loads(line)
                except (ValueError, RecursionError):
                    values = None
                if not isinstance(values, dict) or values.keys() != names or not _typed(values):
                    raise ValueError(f"{path}:{number} is no sample that megarl eval writes; evaluate again")
                records.append(Record(**values))
    except (OSError, UnicodeDecodeError) as e:
        raise ValueError(f"'{path}' cannot be read: {getattr(e, 'strerror', None) or e}") from e
    if not records:
        raise ValueError(f"'{path}' holds no samples; evaluate again")
    return records


def write_whole(path: str, write: Callable[[IO[str]], None]) -> None:
    """Write a file that gets its name when it is whole and on the disk, so that no reader sees half of it."""
    partial = f"{path}.partial"
    with open(partial, "w", encoding="utf-8", errors="backslashreplace", opener=no_link) as f:
        write(f)
        f.flush()
        os.fsync(f.fileno())
    os.replace(partial, path)


def by_prompt(records: Sequence[Record]) -> dict[int, list[Record]]:
    """Group records by the prompt's index, in order of first appearance."""
    prompts: dict[int, list[Record]] = {}
    for record in records:
        prompts.setdefault(record.index, []).append(record)
    return prompts


def _typed(values: dict[str, Any]) -> bool:
    whole = all(type(values[name]) is int for name in ("index", "sample", "tokens"))
    text = all(isinstance(values[name], str) for name in ("source", "row", "prompt", "response", "answer", "finish"))
    score = values["score"]
    number = isinstance(score, int | float) and not isinstance(score, bool)
    return whole and text and (score is None or (number and not abs(score) >= _LARGEST))
