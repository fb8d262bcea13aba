"""What NVML says of this rank's GPU: utilisation, power, temperature, memory. Nothing where there is no such GPU."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

SECONDS = 1.0
"""Between two readings; NVML's own utilisation is that of a window of up to one second."""


@dataclass(frozen=True, kw_only=True)
class GpuReading:
    """Of one GPU, at one time.

    Attributes:
        utilization: share of NVML's window in which a kernel ran.
        power: W.
        temperature: degrees Celsius.
        memory: share in use.
    """

    utilization: float
    power: float
    temperature: float
    memory: float


class GpuSampler:
    """Reads a GPU every second in a thread; silent, and without readings, where driver or library are missing."""

    def __init__(self, uuid: str) -> None:
        """
        Args:
            uuid: as CUDA gives it; indices of CUDA and NVML differ under CUDA_VISIBLE_DEVICES.
        """
        self._readings: list[GpuReading] = []
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        try:
            import pynvml

            pynvml.nvmlInit()
            handle = pynvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith("GPU-") else f"GPU-{uuid}")
            self._readings.append(_read(pynvml, handle))
        except Exception:  # ImportError, or NVMLError: no driver, a GPU it does not know, a value it does not have
            return
        self._thread = threading.Thread(target=self._work, args=(pynvml, handle), daemon=True, name="megarl-nvml")
        self._thread.start()

    def collect(self) -> list[GpuReading]:
        """The readings since the last call; the newest stays, so that a short step has one too."""
        taken, self._readings = self._readings, self._readings[-1:]
        return taken

    def close(self) -> None:
        self._ended.set()
        if self._thread is not None:
            self._thread.join(2 * SECONDS)

    def _work(self, pynvml: Any, handle: Any) -> None:
        while not self._ended.wait(SECONDS):
            try:
                self._readings.append(_read(pynvml, handle))
            except pynvml.NVMLError:  # the GPU has fallen off the bus, say; training will tell
                return


def _read(pynvml: Any, handle: Any) -> GpuReading:
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    return GpuReading(
        utilization=pynvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100,
        power=pynvml.nvmlDeviceGetPowerUsage(handle) / 1000,
        temperature=float(pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU)),
        memory=memory.used / memory.total,
    )


def gpu_metrics(of_gpus: Sequence[Sequence[GpuReading]]) -> Mapping[str, float]:
    """`gpu/...` of a step.

    Args:
        of_gpus: readings of each GPU; those without any do not count.
    """
    read = [readings for readings in of_gpus if readings]
    if not read:
        return {}
    busy = [fmean(one.utilization for one in readings) for readings in read]
    return {
        "gpu/utilization_mean": fmean(busy),
        "gpu/utilization_min": min(busy),
        "gpu/power_w": sum(fmean(one.power for one in readings) for readings in read),
        "gpu/temperature_max_c": max(one.temperature for readings in read for one in readings),
        "gpu/memory_max": max(one.memory for readings in read for one in readings),
    }
