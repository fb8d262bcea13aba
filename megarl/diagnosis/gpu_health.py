"""Looks at the state of a GPU through NVML: memory errors, what slows its clock, the clock itself."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from megarl.diagnosis.hosts import GpuReport

SIDE, PRODUCTS = 8192, 300
"""Of the matrices that a GPU multiplies while it is looked at: 0.5 s of an H100."""


def gpu_report(index: int) -> GpuReport:
    """Describe a GPU while it works; without NVML it has neither clock nor faults.

    Args:
        index: torch's number of the GPU.
    """
    name = torch.cuda.get_device_name(index)
    try:
        import pynvml

        pynvml.nvmlInit()
        uuid = str(torch.cuda.get_device_properties(index).uuid)
        handle = pynvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith("GPU-") else f"GPU-{uuid}")
        _work(index)
        mhz = pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM)
    except Exception:  # ImportError, or NVMLError: no library, or a GPU that it does not know
        return GpuReport(name=name)
    return GpuReport(name=name, mhz=mhz, faults=(*_memory(pynvml, handle), *_slowdowns(pynvml, handle)))


def _work(index: int) -> None:
    """Start some tenths of a second of matrix products, and do not wait for them: an idle GPU lowers its clock."""
    factor = torch.zeros(SIDE, SIDE, dtype=torch.bfloat16, device=torch.device("cuda", index))
    for _ in range(PRODUCTS):
        torch.mm(factor, factor)
    torch.cuda.current_stream().query()  # hands them to the GPU
    time.sleep(0.1)


def _memory(nvml: Any, handle: Any) -> list[str]:
    faults = []
    errors = _asked(
        nvml,
        lambda: nvml.nvmlDeviceGetTotalEccErrors(
            handle, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
        ),
    )
    if errors:
        faults.append(f"{errors} uncorrected ECC errors since its driver started")
    _, _, is_pending, has_failed = _asked(nvml, lambda: nvml.nvmlDeviceGetRemappedRows(handle)) or (0, 0, 0, 0)
    if is_pending:
        faults.append("rows of its memory wait to be remapped: reset it")
    if has_failed:
        faults.append("a row of its memory could not be remapped: have it replaced")
    return faults


def _slowdowns(nvml: Any, handle: Any) -> list[str]:
    reasons = {
        nvml.nvmlClocksThrottleReasonHwThermalSlowdown: "its clock is low: too hot",
        nvml.nvmlClocksThrottleReasonSwThermalSlowdown: "its clock is low: too hot for its driver",
        nvml.nvmlClocksThrottleReasonHwPowerBrakeSlowdown: "its clock is low: the power supply brakes it",
    }
    active = _asked(nvml, lambda: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)) or 0
    return [text for bit, text in reasons.items() if active & bit]


def _asked(nvml: Any, question: Callable[[], Any]) -> Any:
    """Ask NVML; None for what this GPU does not tell."""
    try:
        return question()
    except nvml.NVMLError:
        return None
