"""Peak allocation of a piece of work, as torch's allocators see it."""

from __future__ import annotations

import gc
from collections.abc import Callable

import torch

MARK = "kvdrift_peak"


def peak_allocation(prepare: Callable[[], Callable[[], object]], device: torch.device) -> int:
    """The most bytes that one run of the work that `prepare()` returns holds beyond what is held when it begins.

    The work is run once before. On a CPU every allocation and release is recorded by torch's profiler, which slows
    the work down; memory that torch does not allocate, such as a kernel's stack, is not seen.
    """
    if device.type == "cuda":
        work = prepare()
        work()
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        work()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    gc.collect()  # garbage of earlier work, freed inside, would be counted against this one
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        work = prepare()
        work()
        with torch.profiler.record_function(MARK):
            work()
    assert profile.profiler is not None
    events = profile.profiler.kineto_results.events()
    (begin,) = (event.start_ns() for event in events if event.name() == MARK)
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    held = peak = 0
    for at, change in changes:
        if at >= begin:
            held += change
            peak = max(peak, held)
    return peak
