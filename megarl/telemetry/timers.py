"""Wall-clock seconds and peak GPU memory per phase of a step."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from megarl.telemetry.memory import peak_memory


class PhaseTimers:
    """`with timers("generate"): ...` adds the block's wall-clock time to a phase.

    Time inside a nested block counts for the inner phase only, so phases never overlap and their sum is the time
    spent in all blocks. So it is with the memory.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._peaks: defaultdict[str, int] = defaultdict(int)
        self._open: list[str] = []
        self._since = 0.0

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        self._charge()
        self._open.append(phase)
        try:
            yield
        finally:
            self._charge()
            self._open.pop()

    @property
    def phase(self) -> str:
        """The innermost open phase; empty between phases."""
        return self._open[-1] if self._open else ""

    def collect(self) -> dict[str, float]:
        """Seconds by phase since the last call, in order of first use; starts again from zero."""
        self._charge()
        seconds = dict(self._seconds)
        self._seconds.clear()
        return seconds

    def collect_peaks(self) -> dict[str, int]:
        """Bytes in use at most by phase since the last call, in order of first use; nothing on CPU ranks."""
        peaks = dict(self._peaks)
        self._peaks.clear()
        return peaks

    def _charge(self) -> None:
        if self._device.type == "cuda":
            # kernels still running would be charged to the next phase; copies on a stream of their own may go on
            torch.cuda.current_stream(self._device).synchronize()
            peak = peak_memory(self._device)
            if self._open:
                self._peaks[self._open[-1]] = max(self._peaks[self._open[-1]], peak)
        now = time.perf_counter()
        if self._open:
            self._seconds[self._open[-1]] += now - self._since
        self._since = now
