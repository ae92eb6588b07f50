"""Energy counters of this machine: NVML for a GPU, RAPL for a CPU."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

import torch

RAPL = Path("/sys/class/powercap")
Counter = Callable[[], float]


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


def _nvml(index: int) -> Counter | None:
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    handle, millijoules = ctypes.c_void_p(), ctypes.c_ulonglong()
    if library.nvmlInit_v2() or library.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle)):
        return None

    def read() -> float:
        library.nvmlDeviceGetTotalEnergyConsumption(handle, ctypes.byref(millijoules))
        return millijoules.value / 1e3

    return None if library.nvmlDeviceGetTotalEnergyConsumption(handle, ctypes.byref(millijoules)) else read
