"""What a timing was taken on: clocks, load, threads, kernels and versions, as they were then."""

from __future__ import annotations

import os
import platform
from typing import Any

import psutil
import torch
import transformers

from kvdrift.kernels import dispatch
from kvdrift.measure import energy


def state(device: torch.device) -> dict[str, Any]:
    """Clock of the device in MHz and the machine's load of the last minute; "unavailable" where they can't be read."""
    if device.type == "cuda":
        clock = energy.gpu_clock(device.index or 0)
    else:
        try:
            frequency = psutil.cpu_freq()
        except (NotImplementedError, OSError):
            frequency = None
        clock = frequency and round(frequency.current)
    return {"clock_mhz": clock or "unavailable", "load": round(psutil.getloadavg()[0], 2)}


def settings(device: torch.device) -> dict[str, Any]:
    """What stays the same throughout a process: threads, the processors it may use, kernels and versions."""
    return {
        "threads": torch.get_num_threads(),
        "processors": psutil.cpu_count() if not hasattr(os, "sched_getaffinity") else len(os.sched_getaffinity(0)),
        "wait_policy": os.environ.get("OMP_WAIT_POLICY", "default").lower(),
        "backend": dispatch.name(device),
        "kernel_build": dispatch.build_id(device),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }
