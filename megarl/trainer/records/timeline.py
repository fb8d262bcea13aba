"""Records when each rank was in which phase, in a timeline: gathered at the end of each step, written by rank 0."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

from megarl.config.trainer import TrainerConfig
from megarl.parallel.watch import Wait
from megarl.parallel.world import World
from megarl.phases import Phase
from megarl.telemetry.spans import RankSpans, SpanFile
from megarl.telemetry.timers import Span

WAIT = "wait"
"""Beside the phases, and within them: a rank stands in an agreement of all ranks until the last one is there."""

Told = Sequence[tuple[int | str, float, float]]
"""`RankSpans` in which a phase of the flow's own stands by its name."""

_NAMES = (*map(str, Phase), WAIT)
_PLACES = {name: place for place, name in enumerate(_NAMES)}
MOST_SPANS = 96
"""Of a rank in a step; of more the longest are kept."""
_SHORTEST, _SHORTEST_WAIT = 1e-4, 1e-3  # seconds: nobody would see less


class Timeline:
    """Records phases over time. Every rank calls, rank 0 writes. Does nothing unless the run writes `metrics.jsonl`.

    `begin` comes before the first step, of which building models and engines is no part. `step` comes right after a
    gather, which no rank leaves before the last one is in it: this moment is the same on all ranks, to well below a
    millisecond. Times are counted from there: the hosts' clocks need not agree.
    """

    def __init__(self, trainer: TrainerConfig, world: World, warn: Callable[[str], None]) -> None:
        self._world, self._warn = world, warn
        self._on = "jsonl" in trainer.logger
        self._file = SpanFile(trainer.run_dir) if self._on and world.rank == 0 else None
        self._unwritten = False
        self._began = self._began_at = 0.0

    def begin(self) -> None:
        """Begin the first step, on all ranks. Their waits until now belong to no step."""
        if self._on:
            self._world.barrier("the beginning of the timeline")
            self._began, self._began_at = time.perf_counter(), time.time()
        self._world.watch.collect_waits()

    def own(self, spans: Sequence[Span], waits: Sequence[Wait]) -> Told:
        """Return the spans that this rank timed since the last step, and its waits for other ranks, to be gathered."""
        if not self._on:
            return []
        least = _SHORTEST_WAIT if self._world.size > 1 else math.inf  # alone: what an agreement takes
        waited = [Span(WAIT, wait.start, wait.seconds) for wait in waits if wait.seconds >= least]
        known = [span for span in spans if span.seconds >= _SHORTEST] + waited
        if len(known) > MOST_SPANS:
            known = sorted(sorted(known, key=lambda span: span.seconds)[-MOST_SPANS:], key=lambda span: span.start)
        return [(_PLACES.get(phase, phase), round(start - self._began, 4), round(s, 4)) for phase, start, s in known]

    def step(self, row: int, loop: str, ranks: Sequence[Told]) -> None:
        """Write the step that ends now; the next one begins.

        Args:
            row: the step's number in the metric files.
            ranks: the spans of all ranks.
        """
        if not self._on:
            return
        began_at, self._began, self._began_at = self._began_at, time.perf_counter(), time.time()
        if self._file is None:
            return
        try:
            self._file.write(row, loop, began_at, *_with_places(ranks))
            self._unwritten = False
        except OSError as e:
            if not self._unwritten:
                self._warn(f"the timeline of step {row} and later ones waits until it can be written: {e}")
            self._unwritten = True

    def rewind(self) -> None:
        """Drop what is written of the step that comes next and of later ones: the run goes back."""
        self.close()

    def close(self) -> None:
        """Close the file. Steps that could not be written are lost."""
        if self._file is not None:
            try:
                self._file.close()
            except OSError as e:
                self._warn(f"the last steps of the timeline are lost: {e}")


def _with_places(ranks: Sequence[Told]) -> tuple[Sequence[str], list[RankSpans]]:
    """Return the names of the phases, a flow's own last, and the spans with their places among the names."""
    of_flow = sorted({phase for spans in ranks for phase, _, _ in spans if isinstance(phase, str)})
    names = (*_NAMES, *of_flow)

    def place(phase: int | str) -> int:
        return names.index(phase) if isinstance(phase, str) else phase

    return names, [[(place(phase), start, seconds) for phase, start, seconds in spans] for spans in ranks]
