"""How much more memory a GPU needs for something than before."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import torch


class ExtraMemory:
    """Extra memory of a GPU since this object was made."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._on_gpu = device, device.type == "cuda"
        if self._on_gpu:
            self.synchronise()
            torch.cuda.empty_cache()
            self._allocated, self._free = torch.cuda.memory_allocated(), torch.cuda.mem_get_info()[0]

    def synchronise(self) -> None:
        if self._on_gpu:
            torch.cuda.synchronize()

    def during(self, job: Callable[[], object]) -> tuple[int, int]:
        """At most during a job: bytes that this process's tensors take, and bytes that the device lacks."""
        if not self._on_gpu:
            job()
            return 0, 0
        torch.cuda.reset_peak_memory_stats()
        lowest, done = [self._free], threading.Event()

        def sample() -> None:
            while not done.is_set():
                lowest.append(torch.cuda.mem_get_info(self._device)[0])
                time.sleep(2e-4)

        sampler = threading.Thread(target=sample)
        sampler.start()
        job()
        self.synchronise()
        done.set()
        sampler.join()
        lowest.append(torch.cuda.mem_get_info()[0])
        return torch.cuda.max_memory_allocated() - self._allocated, self._free - min(lowest)
