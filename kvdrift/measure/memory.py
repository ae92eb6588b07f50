"""Peak allocation of a piece of work, as torch's allocators see it."""

from __future__ import annotations

from collections.abc import Callable

import torch


def peak_allocation(work: Callable[[], object], device: torch.device) -> int:
    """The most bytes that `work()` holds at one time, beyond what was held before it.

    On a CPU every allocation and release is recorded by torch's profiler, which slows the work down; memory that
    torch does not allocate, such as a kernel's stack, is not seen.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        work()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        work()
    events = profile.profiler.kineto_results.events()  # type: ignore[union-attr]
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    held = peak = 0
    for _, change in changes:
        held += change
        peak = max(peak, held)
    return peak
