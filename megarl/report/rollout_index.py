"""Stores sample rollouts of a run by column: a small index of all rollouts, and their texts and tokens in chunks."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megarl.telemetry.lines import complete_lines

CHUNK = 1024
"""Rollouts per block of texts or tokens."""
_BATCH_BYTES = 4 * 2**20
_FILE = re.compile(r"step_(\d{1,12})\.jsonl")
_FINISH = {"stop": 0, "length": 1}
_UNKNOWN = 2
_COLUMNS = ("step", "reward", "length", "finish", "source", "prompt", "group", "sample", "turns")
_PER_TOKEN = ("logp", "advantage", "gap")

Files = tuple[tuple[str, int, int], ...]
"""(path, nanosecond of the last change, bytes) of each file: blocks of the files are valid while these are equal."""


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """Holds responses, and the details that are shown when a response is opened."""

    texts: list[str] = field(default_factory=list)
    details: list[dict[str, Any]] = field(default_factory=list)


@dataclass(kw_only=True)
class FileBatch:
    """Holds the index of some rollout files.

    Attributes:
        columns: the columns `_COLUMNS`; source and prompt are places in `sources` and `prompts`.
        sources: names of data sources -> place.
        prompts: (index or -1, text) -> place.
        sizes: number of rollouts in each chunk.
        damaged: number of unreadable lines and files.
    """

    columns: dict[str, list[Any]] = field(default_factory=lambda: {name: [] for name in _COLUMNS})
    sources: dict[str, int] = field(default_factory=dict)
    prompts: dict[tuple[int, str], int] = field(default_factory=dict)
    sizes: list[int] = field(default_factory=list)
    damaged: int = 0


def file_batches(run_dir: str, last_step: int | None) -> list[Files]:
    """Group a run's rollout files, in order of steps, into batches of some megabytes.

    Args:
        last_step: files of later steps are left out: the run went back and has not reached these steps again.
    """
    folder = os.path.join(run_dir, "rollouts")
    try:
        names = os.listdir(folder)
    except OSError:
        return []
    steps = sorted((int(match[1]), name) for name in names if (match := _FILE.fullmatch(name)))
    batches: list[Files] = []
    batch: list[tuple[str, int, int]] = []
    for step, name in steps:
        if last_step is not None and step > last_step:
            break
        path = os.path.join(folder, name)
        try:
            status = os.stat(path)
        except OSError:
            continue  # deleted meanwhile
        batch.append((path, status.st_mtime_ns, status.st_size))
        if sum(size for _, _, size in batch) >= _BATCH_BYTES:
            batches.append(tuple(batch))
            batch = []
    return [*batches, *([tuple(batch)] if batch else [])]


def read_batch(files: Files) -> tuple[FileBatch, list[Chunk]]:
    """Read rollout files into an index and chunks. A file that was deleted meanwhile is skipped."""
    batch, chunks = FileBatch(), list[Chunk]()
    for path, _, _ in files:
        match = _FILE.fullmatch(os.path.basename(path))
        assert match is not None
        try:
            lines = complete_lines(path)
        except FileNotFoundError:
            continue  # deleted meanwhile
        except OSError:
            batch.damaged += 1
            continue
        for line in lines:
            record = _record(line)
            if record is None:
                batch.damaged += 1
            else:
                _add(batch, int(match[1]), record)
                if not chunks or len(chunks[-1].texts) == CHUNK:
                    chunks.append(Chunk())
                chunks[-1].texts.append(record["response"])
                chunks[-1].details.append(dict(_details(record)))
    batch.sizes += [len(chunk.texts) for chunk in chunks]
    return batch, chunks


def index_of(batches: Sequence[FileBatch]) -> dict[str, Any]:
    """Join the indexes of batches: columns, tables of sources and prompts, and the sizes of the chunks."""
    sources: dict[str, int] = {}
    prompts: dict[tuple[int, str], int] = {}
    columns: dict[str, list[Any]] = {name: [] for name in _COLUMNS}
    for batch in batches:
        source_places = [sources.setdefault(name, len(sources)) for name in batch.sources]
        prompt_places = [prompts.setdefault(prompt, len(prompts)) for prompt in batch.prompts]
        for name in _COLUMNS:
            columns[name] += batch.columns[name] if name not in ("source", "prompt") else []
        columns["source"] += [source_places[place] for place in batch.columns["source"]]
        columns["prompt"] += [prompt_places[place] for place in batch.columns["prompt"]]
    return {
        "columns": columns,
        "sources": list(sources),
        "prompts": [list(prompt) for prompt in prompts],
        "chunks": [size for batch in batches for size in batch.sizes],
        "damaged": sum(batch.damaged for batch in batches),
    }


def _add(batch: FileBatch, step: int, record: Mapping[str, Any]) -> None:
    source, prompt = record.get("source") or "", (_whole(record.get("index"), -1), record["prompt"])
    turns = record.get("turns")
    values = {
        "step": step,
        "reward": record["reward"],
        "length": _whole(record.get("length"), -1),
        "finish": _FINISH.get(str(record.get("finish")), _UNKNOWN),
        "source": batch.sources.setdefault(str(source), len(batch.sources)),
        "prompt": batch.prompts.setdefault(prompt, len(batch.prompts)),
        "group": _whole(record.get("group"), -1),
        "sample": _whole(record.get("sample"), -1),
        "turns": len(turns) if isinstance(turns, list) else 0,
    }
    for name, value in values.items():
        batch.columns[name].append(value)


def _record(line: bytes) -> dict[str, Any] | None:
    """Parse a line; None if it is no rollout."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict) or not all(isinstance(record.get(key), str) for key in ("prompt", "response")):
        return None
    reward = record.setdefault("reward", None)
    return record if reward is None or _is_number(reward) else None


def _details(record: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the record's further fields that are well formed."""
    for name in ("answer", "error"):
        if isinstance(record.get(name), str):
            yield name, record[name]
    parts = record.get("parts")
    if isinstance(parts, dict) and all(map(_is_number, parts.values())):
        yield "parts", parts
    turns = record.get("turns")
    if isinstance(turns, list) and all(isinstance(t, list) and list(map(type, t)) == [str, str] for t in turns):
        yield "turns", turns
        lengths = record.get("turn_lengths")
        if isinstance(lengths, list) and len(lengths) == len(turns) and all(type(n) is int for n in lengths):
            yield "turn_lengths", lengths
    tokens = record.get("tokens")
    if isinstance(tokens, list) and all(isinstance(token, str) for token in tokens):
        yield "tokens", tokens
        for name in _PER_TOKEN:
            values = record.get(name)
            fits = isinstance(values, list) and len(values) == len(tokens)
            if fits and all(value is None or _is_number(value) for value in values or ()):
                yield name, values


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < 1e300


def _whole(value: Any, default: int) -> int:
    return value if type(value) is int and abs(value) < 2**53 else default
