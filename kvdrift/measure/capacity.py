"""How many sequences decode under a byte budget: found by trying, beside what the ledger and the bandwidth predict."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from kvdrift.ledger import CacheShape, account
from kvdrift.policy import CachePolicy


def largest(stable: Callable[[int], bool], start: int, limit: int) -> int:
    """The largest n in 0 … limit for which `stable(n)` holds, given that it holds for every smaller n.

    Begins at `start` and moves by steps that double, then bisects, so that a good guess takes two trials.
    """
    low, high, step = 0, limit + 1, 1
    n = min(max(start, 1), limit)
    while high - low > 1:
        if stable(n):
            low = n
            n = min(low + step, (low + high) // 2 if high <= limit else limit)
        else:
            high = n
            n = max(high - step, (low + high) // 2 if low else 1)
        step *= 2
    return low


def predicted(policy: CachePolicy, shape: CacheShape, lengths: range, budget: int, limit: int) -> int:
    """The most sequences whose cache stays within `budget` bytes at every one of these lengths, by the ledger."""
    most = max(account(policy, shape, tokens, 1).format_bytes for tokens in lengths)
    return min(budget // most, limit)


def copy_bandwidth(device: torch.device, size: int = 1 << 28) -> float:
    """Bytes read and written a second by copying `size` bytes, the best of five."""
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        target.copy_(source)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - start)
    return 2 * size / best
