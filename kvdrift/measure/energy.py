"""Energy counters and clocks of this machine: NVML for a GPU, RAPL for a CPU."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

import torch

RAPL = Path("/sys/class/powercap")
Counter = Callable[[], float]
SM_CLOCK = 1
"""NVML's name of the clock that kernels run at."""


def counter(device: torch.device) -> Counter | None:
    """A function that reads joules used so far by the device; None where nothing can be read."""
    return _nvml(device.index or 0) if device.type == "cuda" else _rapl()


def _rapl() -> Counter | None:
    """The sum over processor packages. A counter that wraps (after hours) is not mended."""
    files = sorted(RAPL.glob("intel-rapl:?/energy_uj"))
    try:
        if not files or not all(file.read_text().strip().isdigit() for file in files):
            return None
    except OSError:
        return None
    return lambda: sum(int(file.read_text()) for file in files) / 1e6


def gpu_clock(index: int) -> int | None:
    """MHz of the GPU's SM clock now; None where NVML doesn't tell."""
    found, megahertz = _handle(index), ctypes.c_uint()
    if found is None or found[0].nvmlDeviceGetClockInfo(found[1], SM_CLOCK, ctypes.byref(megahertz)):
        return None
    return megahertz.value


def _handle(index: int) -> tuple[ctypes.CDLL, ctypes.c_void_p] | None:
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    handle = ctypes.c_void_p()
    if library.nvmlInit_v2() or library.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle)):
        return None
    return library, handle


def _nvml(index: int) -> Counter | None:
    found, millijoules = _handle(index), ctypes.c_ulonglong()
    if found is None:
        return None
    library, handle = found

    def read() -> float:
        library.nvmlDeviceGetTotalEnergyConsumption(handle, ctypes.byref(millijoules))
        return millijoules.value / 1e3

    return None if library.nvmlDeviceGetTotalEnergyConsumption(handle, ctypes.byref(millijoules)) else read
