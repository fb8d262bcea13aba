"""When each rank was in which phase, on one time axis: gathered at the end of each step, written by rank 0."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from megarl.config.trainer import Trainer
from megarl.parallel.groups import Groups
from megarl.parallel.watch import Wait
from megarl.phases import Phase
from megarl.telemetry.spans import SpanFile
from megarl.telemetry.timers import Span

WAIT = "wait"
"""Beside the phases, and within them: a rank stands in an agreement of all ranks until the last one is there."""

_NAMES = (*map(str, Phase), WAIT)
_PLACES = {name: place for place, name in enumerate(_NAMES)}
MOST_SPANS = 96
"""Of a rank in a step; of more the longest are kept."""
_SHORTEST, _SHORTEST_WAIT = 1e-4, 1e-3  # seconds: nobody would see less


class Timeline:
    """Every rank calls its methods; rank 0 writes. Does nothing unless the run writes `metrics.jsonl`.

    No rank leaves the gather before the last one is in it, so the moment after it is the same on all ranks, to well
    below a millisecond. Times are counted from there: the hosts' clocks need not agree.
    """

    def __init__(self, trainer: Trainer, groups: Groups, warn: Callable[[str], None]) -> None:
        self._groups, self._warn = groups, warn
        self._on = "jsonl" in trainer.logger
        self._file = SpanFile(trainer.run_dir) if self._on and groups.rank == 0 else None
        self._unwritten = False
        if self._on:
            groups.barrier("the beginning of the timeline")
        self._began, self._began_at = time.perf_counter(), time.time()

    def step(self, row: int, loop: str, spans: Sequence[Span], waits: Sequence[Wait]) -> None:
        """What was timed since the last call, and the waits for other ranks among it, under the step's number in the
        metric files."""
        if not self._on:
            return
        waited = [Span(WAIT, wait.start, wait.seconds) for wait in waits if wait.seconds >= _SHORTEST_WAIT]
        table = _table([*spans, *waited], self._began)
        gathered = self._groups.all_gather_tensor(table, "the times of all ranks")
        began_at, self._began, self._began_at = self._began_at, time.perf_counter(), time.time()
        if self._file is None:
            return
        try:
            self._file.write(row, loop, began_at, _NAMES, [_spans(of_rank) for of_rank in gathered])
            self._unwritten = False
        except OSError as e:
            if not self._unwritten:
                self._warn(f"the timeline of step {row} and later ones waits until it can be written: {e}")
            self._unwritten = True

    def rewind(self) -> None:
        """The run goes back: what is there of the step that comes next, and of later ones, is dropped."""
        self.close()

    def close(self) -> None:
        """Steps that could not be written are lost."""
        if self._file is not None:
            try:
                self._file.close()
            except OSError as e:
                self._warn(f"the last steps of the timeline are lost: {e}")


def _table(spans: Sequence[Span], began: float) -> torch.Tensor:
    """float64 [MOST_SPANS, 3]: place of the name, start after `began`, seconds; -1 in rows that are free."""
    known = [span for span in spans if span.phase in _PLACES and span.seconds >= _SHORTEST]
    if len(known) > MOST_SPANS:
        known = sorted(sorted(known, key=lambda span: span.seconds)[-MOST_SPANS:], key=lambda span: span.start)
    table = torch.full((MOST_SPANS, 3), -1.0, dtype=torch.float64)
    if known:
        rows = [(float(_PLACES[phase]), start - began, seconds) for phase, start, seconds in known]
        table[: len(rows)] = torch.tensor(rows, dtype=torch.float64)
    return table


def _spans(table: torch.Tensor) -> list[tuple[int, float, float]]:
    return [(int(place), round(start, 4), round(s, 4)) for place, start, s in table.tolist() if place >= 0]
