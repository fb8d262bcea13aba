"""The blocks of a report: named JSON values, compressed. Those whose files have not changed are made once."""

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
from megarl.report.rollouts import Batch, Files, file_batches, index_of, read_batch
from megarl.report.runs import Run, curves
from megarl.report.settings import settings
from megarl.telemetry.lines import complete_lines
from megarl.telemetry.spans import newest, read_spans, span_files

MOST_TIMELINE_STEPS = 500
_MOST_SPANS = 400_000  # of all ranks and steps together: a page stays quick with these
BUDGET_FILE = "memory.json"


@dataclass(frozen=True, kw_only=True)
class Block:
    """A value as it travels: JSON, gzip.

    Attributes:
        version: other content has another one.
    """

    data: bytes
    version: str

    @staticmethod
    def of(value: Any) -> Block:
        text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
        data = text.encode("utf-8", "replace")  # half a surrogate pair, say
        return Block(data=gzip.compress(data, 5, mtime=0), version=hashlib.sha256(data).hexdigest()[:16])


@dataclass(frozen=True, kw_only=True)
class _OfRollouts:
    """What is made of some rollout files: the index columns, and the blocks of the chunks."""

    batch: Batch
    texts: list[Block]
    details: list[Block]


class Blocks:
    """Reads the runs again at each `refresh`.

    Attributes:
        blocks: by name.
    """

    def __init__(self, runs: Sequence[Run]) -> None:
        self._runs = list(runs)
        self._made: dict[tuple[str, Any], Block] = {}
        self._of_rollouts: dict[Files, _OfRollouts] = {}
        self.blocks: dict[str, Block] = {}

    def refresh(self) -> dict[str, Block]:
        """All blocks, of the runs as they are now."""
        before, self._made, kept = self._made, {}, self._of_rollouts
        self._of_rollouts = {}

        def cached(name: str, files: Sequence[str], make: Callable[[], Any]) -> Block:
            key = (name, tuple(map(_signature, files)))
            self._made[key] = block = before.get(key) or Block.of(make())
            return block

        found: dict[str, Block] = {}
        configs = [os.path.join(run.folder, CONFIG_FILE) for run in self._runs]
        found["settings"] = cached("settings", configs, lambda: settings(self._runs))
        listed = []
        for place, run in enumerate(self._runs):
            table = curves(run)
            last_step = table["steps"][-1] + 1 if table["steps"] else None  # one may be under way
            found[f"curves-{place}"] = Block.of(table)
            spans = span_files(run.folder)
            found[f"timeline-{place}"] = cached(f"timeline-{place}-{last_step}", spans, _timeline(spans, last_step))
            budget = os.path.join(run.folder, BUDGET_FILE)
            found[f"memory-{place}"] = cached(f"memory-{place}", [budget], partial(_budget_at, budget))
            found |= self._rollouts(place, run, last_step, kept)
            listed.append({"name": run.name, "folder": run.folder})
        found["runs"] = Block.of({"runs": listed})
        self.blocks = found
        return found

    def _rollouts(
        self, place: int, run: Run, last_step: int | None, kept: dict[Files, _OfRollouts]
    ) -> dict[str, Block]:
        made = []
        for files in file_batches(run.folder, last_step):
            self._of_rollouts[files] = one = kept.get(files) or _of_files(files)
            made.append(one)
        found = {f"rollouts-{place}": Block.of(index_of([one.batch for one in made]))}
        for kind in ("texts", "details"):
            chunks = [block for one in made for block in getattr(one, kind)]
            found |= {f"{kind}-{place}-{i}": block for i, block in enumerate(chunks)}
        return found


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
        wanted = [row for row in rows if last_step is None or row["step"] < last_step]
        shown, spans = newest(iter(wanted), MOST_TIMELINE_STEPS), 0
        for i in range(len(shown) - 1, -1, -1):
            spans += sum(len(of_rank) for of_rank in shown[i]["ranks"]) // 3
            if spans > _MOST_SPANS and i < len(shown) - 1:
                shown = shown[i + 1 :]
                break
        return {"steps": shown, "damaged": len(lines) - len(rows)}

    return make


def _budget_at(path: str) -> Any:
    """None: there is none, or it makes no sense."""
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
    sizes = [value.get("bytes"), *(nbytes for one in items for nbytes in one.values())]
    return len(items) == len(value["phases"]) and all(type(size) is int and 0 <= size < 2**60 for size in sizes)


def _signature(path: str) -> tuple[str, int, int]:
    try:
        found = os.stat(path)
    except OSError:
        return path, 0, 0
    return path, found.st_mtime_ns, found.st_size


def now() -> str:
    """For people, UTC."""
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
