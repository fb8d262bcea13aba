"""Wall-clock seconds and peak GPU memory per phase of a step."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import NamedTuple

import torch

from megarl.telemetry.memory import peak_memory

Ranges = Callable[[str], AbstractContextManager[None]]


class Span(NamedTuple):
    """A stretch of one phase: `start` on this process's `time.perf_counter`, and its seconds."""

    phase: str
    start: float
    seconds: float


class PhaseTimers:
    """`with timers("generate"): ...` adds the block's time to a phase.

    Time inside a nested block counts for the inner phase only, so phases never overlap and their sum is the time
    spent in all blocks. So it is with the memory.

    On a GPU the edges of the phases are events in the current stream, and nothing waits for them before `collect`: a
    kernel counts for the phase that launched it, and the host may run ahead.
    """

    def __init__(self, device: torch.device, ranges: Ranges | None = None) -> None:
        """
        Args:
            ranges: what is entered with each phase, such as a profiler's range of that name; None: nothing.
        """
        self._device, self._ranges = device, ranges or (lambda phase: nullcontext())
        self._edges: list[tuple[float | torch.cuda.Event, str | None]] = []  # when, and the phase that ends there
        self._peaks: defaultdict[str, int] = defaultdict(int)
        self._open: list[str] = []

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        self._edge()
        self._open.append(phase)
        try:
            with self._ranges(phase):
                yield
        finally:
            self._edge()
            self._open.pop()

    @property
    def phase(self) -> str:
        """The innermost open phase; empty between phases."""
        return self._open[-1] if self._open else ""

    def spans(self) -> list[Span]:
        """What was timed since the last call, in order; starts again from none. Waits for the GPU."""
        self._edge()
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        now, (last, _) = time.perf_counter(), self._edges[-1]
        found = [
            Span(phase, now - _between(start, last), _between(start, stop))
            for (start, _), (stop, phase) in zip(self._edges, self._edges[1:], strict=False)
            if phase is not None
        ]
        self._edges = self._edges[-1:]
        return found

    def collect(self) -> dict[str, float]:
        """Seconds by phase since the last call, in order of first use; starts again from zero. Waits for the GPU."""
        return seconds_by_phase(self.spans())

    def collect_peaks(self) -> dict[str, int]:
        """Bytes in use at most by phase since the last call, in order of first use; nothing on CPU ranks."""
        peaks = dict(self._peaks)
        self._peaks.clear()
        return peaks

    def _edge(self) -> None:
        now: float | torch.cuda.Event = time.perf_counter()
        phase = self._open[-1] if self._open else None
        if self._device.type == "cuda":
            now = torch.cuda.Event(enable_timing=True)
            now.record(torch.cuda.current_stream(self._device))
            peak = peak_memory(self._device)
            if phase is not None:
                self._peaks[phase] = max(self._peaks[phase], peak)
        self._edges.append((now, phase))


def seconds_by_phase(spans: Iterable[Span]) -> dict[str, float]:
    """Phases in order of first use."""
    seconds: dict[str, float] = {}
    for phase, _, lasted in spans:
        seconds[phase] = seconds.get(phase, 0.0) + lasted
    return seconds


def _between(start: float | torch.cuda.Event, stop: float | torch.cuda.Event) -> float:
    if isinstance(start, torch.cuda.Event) and isinstance(stop, torch.cuda.Event):
        return float(start.elapsed_time(stop)) / 1000
    assert isinstance(start, float) and isinstance(stop, float)
    return stop - start
