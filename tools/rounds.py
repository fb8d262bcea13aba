"""Times jobs against each other: in alternating rounds, so that clocks and temperature are the same for all."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

import torch

from megarl.parallel.world import World


class Rounds:
    """Wall-clock seconds of jobs on all ranks, and the peak of allocated GPU memory (0 on CPUs)."""

    def __init__(self, world: World) -> None:
        self._on_gpu, self._world = world.device.type == "cuda", world

    def medians(
        self, jobs: Mapping[str, Callable[[], object]], rounds: int, *, warm_up: int
    ) -> dict[str, tuple[float, float]]:
        """Seconds, median over the rounds after the warm-up, and peak GiB in the last one, of each job."""
        seconds: dict[str, list[float]] = {name: [] for name in jobs}
        peaks = {}
        for _ in range(warm_up + rounds):
            for name, job in jobs.items():
                taken, peaks[name] = self.once(job)
                seconds[name].append(taken)
        return {name: (statistics.median(taken[warm_up:]), peaks[name]) for name, taken in seconds.items()}

    def once(self, job: Callable[[], object]) -> tuple[float, float]:
        """Seconds until the job is done on all ranks, and peak GiB on this one."""
        if self._on_gpu:
            torch.cuda.reset_peak_memory_stats()
        self._wait()
        began = time.perf_counter()
        job()
        self._wait()
        taken = time.perf_counter() - began
        return taken, torch.cuda.max_memory_allocated() / 2**30 if self._on_gpu else 0.0

    def _wait(self) -> None:
        if self._on_gpu:
            torch.cuda.synchronize()
        self._world.barrier("a benchmark")
