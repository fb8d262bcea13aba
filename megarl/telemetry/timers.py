"""Measures wall-clock seconds and peak GPU memory per phase of a step."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import NamedTuple

import torch

Ranges = Callable[[str], AbstractContextManager[None]]


class Span(NamedTuple):
    """Holds an uninterrupted stretch of one phase. `start` is on this process's `time.perf_counter`."""

    phase: str
    start: float
    seconds: float


class PhaseTimers:
    """Measures phases: `with timers("generate"): ...` adds the block's time to the phase `generate`.

    Time and peak memory inside a nested block count for the inner phase only, so phases never overlap and their sum is
    the time spent in all blocks. Of a phase that is timed as a whole, all time counts for itself.

    On a GPU the edges of the phases are events in the current stream, for which only `spans` and `collect` wait: a
    kernel counts for the phase that launched it, and the host may run ahead.
    """

    def __init__(self, device: torch.device, ranges: Ranges | None = None) -> None:
        """
        Args:
            ranges: makes a context manager to enter with each phase, such as a profiler's range of that name.
        """
        self._device, self._ranges = device, ranges or (lambda phase: nullcontext())
        self._edges: list[tuple[float | torch.cuda.Event, str | None]] = []  # time, and the phase that ends then
        self._peaks: defaultdict[str, int] = defaultdict(int)
        self._open: list[str] = []
        self._whole: str | None = None  # the open phase that is timed as a whole

    @contextmanager
    def __call__(self, phase: str, *, whole: bool = False) -> Iterator[None]:
        self._edge()
        self._open.append(phase)
        outer, self._whole = self._whole, self._whole or (phase if whole else None)
        try:
            with self._ranges(phase):
                yield
        finally:
            self._edge()
            self._open.pop()
            self._whole = outer

    @property
    def phase(self) -> str:
        """Return the name of the phase for which time counts now; empty between phases."""
        return self._whole or (self._open[-1] if self._open else "")

    def spans(self) -> list[Span]:
        """Return the spans since the last call in order, and forget them. Waits for the GPU."""
        self._edge()
        last, _ = self._edges[-1]
        if isinstance(last, float):
            now = last
        else:
            last.synchronize()
            now = time.perf_counter()
        spans = [
            Span(phase, now - _between(start, last), _between(start, stop))
            for (start, _), (stop, phase) in zip(self._edges, self._edges[1:], strict=False)
            if phase is not None
        ]
        self._edges = self._edges[-1:]
        return spans

    def collect(self) -> dict[str, float]:
        """Return the seconds of each phase since the last call, in order of first use. Waits for the GPU."""
        return seconds_by_phase(self.spans())

    def collect_peaks(self) -> dict[str, int]:
        """Return each phase's peak of used bytes since the last call, in order of first use; {} on CPU ranks."""
        peaks = dict(self._peaks)
        self._peaks.clear()
        return peaks

    def _edge(self) -> None:
        now = _edge_of(self._device)
        phase = self._open[-1] if self._open else None
        if self._device.type == "cuda":
            peak = peak_memory(self._device)
            if phase is not None:
                self._peaks[phase] = max(self._peaks[phase], peak)
        self._edges.append((now, self._whole or phase))


class Stopwatch:
    """Measures its last block, `with stopwatch: ...`; on a GPU between events of the current stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._start = self._stop = _edge_of(device)

    def __enter__(self) -> None:
        self._start = _edge_of(self._device)

    def __exit__(self, *_: object) -> None:
        self._stop = _edge_of(self._device)

    @property
    def seconds(self) -> float:
        """Tell how long the last block took. Waits until the GPU has come to its end."""
        if isinstance(self._stop, torch.cuda.Event):
            self._stop.synchronize()
        return _between(self._start, self._stop)


def seconds_by_phase(spans: Iterable[Span]) -> dict[str, float]:
    """Sum the seconds of each phase, phases in order of first use."""
    seconds: dict[str, float] = {}
    for phase, _, lasted in spans:
        seconds[phase] = seconds.get(phase, 0.0) + lasted
    return seconds


def peak_memory(device: torch.device) -> int:
    """Return the peak of used bytes since the last call: tensors, and all else that is on the GPU.

    Blocks that torch keeps in reserve do not count: training and the engine have them released when they need memory.
    """
    free, total = torch.cuda.mem_get_info(device)
    # torch counts the memory of a sleeping vLLM in both of its own figures, although it is free: it cancels out
    outside_torch = total - free - torch.cuda.memory_reserved(device)
    peak = outside_torch + torch.cuda.max_memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    return peak


def _edge_of(device: torch.device) -> float | torch.cuda.Event:
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def _between(start: float | torch.cuda.Event, stop: float | torch.cuda.Event) -> float:
    if isinstance(start, torch.cuda.Event) and isinstance(stop, torch.cuda.Event):
        return float(start.elapsed_time(stop)) / 1000
    assert isinstance(start, float) and isinstance(stop, float)
    return stop - start
