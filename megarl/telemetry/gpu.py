"""Reads this rank's GPU through NVML: utilisation, power, temperature, memory. No readings without such a GPU."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

SECONDS = 1.0
"""Seconds between two readings. NVML itself averages utilisation over a window of up to one second."""


@dataclass(frozen=True, kw_only=True)
class GpuReading:
    """Holds a reading of a GPU.

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
    """Reads a GPU every second in a thread. Without a driver or library it says nothing and has no readings."""

    def __init__(self, uuid: str) -> None:
        """
        Args:
            uuid: the GPU's UUID from CUDA; the indices of CUDA and NVML differ under CUDA_VISIBLE_DEVICES.
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
        """Return the readings since the last call. The newest is kept, so that a short step has a reading, too."""
        readings, self._readings = self._readings, self._readings[-1:]
        return readings

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
    """Compute a step's metrics `gpu/...`.

    Args:
        of_gpus: readings of each GPU; a GPU without readings does not count.
    """
    gpus = [readings for readings in of_gpus if readings]
    if not gpus:
        return {}
    utilization = [fmean(reading.utilization for reading in readings) for readings in gpus]
    return {
        "gpu/utilization_mean": fmean(utilization),
        "gpu/utilization_min": min(utilization),
        "gpu/power_w": sum(fmean(reading.power for reading in readings) for readings in gpus),
        "gpu/temperature_max_c": max(reading.temperature for readings in gpus for reading in readings),
        "gpu/memory_max": max(reading.memory for readings in gpus for reading in readings),
    }
