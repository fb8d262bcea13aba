"""Wall-clock seconds per phase of a step."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class PhaseTimers:
    """`with timers("generate"): ...` adds the block's wall-clock time to a phase.

    Time inside a nested block counts for the inner phase only, so phases never overlap and their sum is the time
    spent in all blocks.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._seconds: defaultdict[str, float] = defaultdict(float)
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

    def collect(self) -> dict[str, float]:
        """Seconds by phase since the last call, in order of first use; starts again from zero."""
        self._charge()
        seconds = dict(self._seconds)
        self._seconds.clear()
        return seconds

    def _charge(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # kernels still running would be charged to the next phase
        now = time.perf_counter()
        if self._open:
            self._seconds[self._open[-1]] += now - self._since
        self._since = now
