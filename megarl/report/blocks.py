"""Makes the blocks of a report: named, compressed JSON values. A block is made again only if its files changed."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from megarl.config.load import CONFIG_FILE
from megarl.report.rollout_index import FileBatch, Files, file_batches, index_of, read_batch
from megarl.report.runs import Run, curves
from megarl.report.settings import settings
from megarl.report.starts import start_files, starts
from megarl.telemetry.lines import complete_lines
from megarl.telemetry.spans import newest, read_spans, span_files

MOST_TIMELINE_STEPS = 500
_MOST_SPANS = 400_000  # of all ranks and steps together: a page stays quick with these
BUDGET_FILE = "memory.json"


@dataclass(frozen=True, kw_only=True)
class Block:
    """Holds a JSON value compressed with gzip.

    Attributes:
        version: a checksum of the content.
    """

    data: bytes
    version: str

    @staticmethod
    def of(value: Any) -> Block:
        text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
        data = text.encode("utf-8", "replace")  # a text may hold half a surrogate pair
        return Block(data=gzip.compress(data, 5, mtime=0), version=hashlib.sha256(data).hexdigest()[:16])


@dataclass(frozen=True, kw_only=True)
class _OfRollouts:
    """Holds the content of some rollout files: the index columns, and the blocks of the chunks."""

    batch: FileBatch
    texts: list[Block]
    details: list[Block]


class Blocks:
    """Makes blocks from the files of runs.

    Attributes:
        blocks: the blocks of the last `refresh` by name.
    """

    def __init__(self, runs: Sequence[Run]) -> None:
        self._runs = list(runs)
        self._cache: dict[tuple[str, Any], Block] = {}
        self._of_rollouts: dict[Files, _OfRollouts] = {}
        self.blocks: dict[str, Block] = {}

    def refresh(self) -> dict[str, Block]:
        """Read the runs' files and return all blocks."""
        before, self._cache, rollouts = self._cache, {}, self._of_rollouts
        self._of_rollouts = {}

        def cached(name: str, files: Sequence[str], make: Callable[[], Any]) -> Block:
            key = (name, tuple(map(_signature, files)))
            self._cache[key] = block = before.get(key) or Block.of(make())
            return block

        blocks: dict[str, Block] = {}
        configs = [os.path.join(run.folder, CONFIG_FILE) for run in self._runs]
        blocks["settings"] = cached("settings", configs, lambda: settings(self._runs))
        runs = []
        for place, run in enumerate(self._runs):
            table = curves(run)
            last_step = table["steps"][-1] + 1 if table["steps"] else None  # a step may have begun after the last row
            blocks[f"curves-{place}"] = Block.of(table)
            spans = span_files(run.folder)
            blocks[f"timeline-{place}"] = cached(f"timeline-{place}-{last_step}", spans, _timeline(spans, last_step))
            budget = os.path.join(run.folder, BUDGET_FILE)
            blocks[f"memory-{place}"] = cached(f"memory-{place}", [budget], partial(_budget_at, budget))
            blocks[f"starts-{place}"] = cached(f"starts-{place}", start_files(run), partial(starts, run))
            blocks |= self._rollouts(place, run, last_step, rollouts)
            runs.append({"name": run.name, "folder": run.folder})
        blocks["runs"] = Block.of({"runs": runs})
        self.blocks = blocks
        return blocks

    def _rollouts(
        self, place: int, run: Run, last_step: int | None, before: dict[Files, _OfRollouts]
    ) -> dict[str, Block]:
        parts = []
        for files in file_batches(run.folder, last_step):
            self._of_rollouts[files] = part = before.get(files) or _of_files(files)
            parts.append(part)
        blocks = {f"rollouts-{place}": Block.of(index_of([part.batch for part in parts]))}
        for kind in ("texts", "details"):
            chunks = [block for part in parts for block in getattr(part, kind)]
            blocks |= {f"{kind}-{place}-{i}": block for i, block in enumerate(chunks)}
        return blocks


def _of_files(files: Files) -> _OfRollouts:
    batch, chunks = read_batch(files)
    return _OfRollouts(
        batch=batch,
        texts=[Block.of(chunk.texts) for chunk in chunks],
        details=[Block.of(chunk.details) for chunk in chunks],
    )


def _timeline(paths: Sequence[str], last_step: int | None) -> Callable[[], Any]:
    def make() -> dict[str, Any]:
        lines = [line for path in paths for line in complete_lines(path)]
        rows = [row for line in lines if (row := read_spans(line)) is not None]
        finished = (row for row in rows if last_step is None or row["step"] < last_step)
        steps, spans = newest(finished, MOST_TIMELINE_STEPS), 0
        for i in range(len(steps) - 1, -1, -1):
            spans += sum(len(of_rank) for of_rank in steps[i]["ranks"]) // 3
            if spans > _MOST_SPANS and i < len(steps) - 1:
                steps = steps[i + 1 :]
                break
        return {"steps": steps, "damaged": len(lines) - len(rows)}

    return make


def _budget_at(path: str) -> Any:
    """Read a run's budget of memory; None if the file is missing or damaged."""
    if not os.path.isfile(path):
        return None
    try:
        with open(path, encoding="utf-8") as f:
            value = json.load(f)
    except (OSError, ValueError, RecursionError):
        return None
    return value if _is_budget(value) else None


def _is_budget(value: Any) -> bool:
    if not isinstance(value, dict) or not isinstance(value.get("phases"), dict):
        return False
    items = [items for items in value["phases"].values() if isinstance(items, dict)]
    sizes = [value.get("bytes"), *(nbytes for phase in items for nbytes in phase.values())]
    return len(items) == len(value["phases"]) and all(type(size) is int and 0 <= size < 2**60 for size in sizes)


def _signature(path: str) -> tuple[str, int, int]:
    try:
        status = os.stat(path)
    except OSError:
        return path, 0, 0
    return path, status.st_mtime_ns, status.st_size


def now() -> str:
    """Write the current time in UTC for people."""
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
