"""Paired timing: two ways of doing one thing, in turn within one process, in random order, after a warm-up.

This file knows clocks and intervals. It knows no cache and no model.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kvdrift.measure.sweep import P95_STEPS, P99_STEPS

RESAMPLES = 2000


@dataclass(frozen=True)
class Pairs:
    """Milliseconds of the same step on the reference path and on the candidate, pair by pair.

    They come from `visits` of equal size, one after the other: each filled its caches anew, some time apart.
    """

    reference: tuple[float, ...]
    candidate: tuple[float, ...]
    visits: int = 1

    def draws(self, resamples: int, rng: np.random.Generator) -> np.ndarray:
        """Indices [resamples, pairs] of a two-level bootstrap: visits are drawn, then pairs within each drawn visit.

        Steps of one visit share where its memory lies and what else the machine does, so pairs alone would give an
        interval that the next run falls out of (Davison & Hinkley, Bootstrap Methods, 1997, §3.8).
        """
        each = len(self.reference) // self.visits
        visit = rng.integers(0, self.visits, (resamples, self.visits, 1))
        within = rng.integers(0, each, (resamples, self.visits, each))
        return (visit * each + within).reshape(resamples, -1)


@dataclass(frozen=True)
class Estimate:
    """A figure with its 95 % bootstrap interval (percentiles), which one pair alone does not have."""

    value: float
    low: float | None
    high: float | None


def paired(
    reference: Callable[[], object],
    candidate: Callable[[], object],
    pairs: int,
    seed: int,
    device: torch.device,
    warmup: int = 2,
) -> Pairs:
    """Run both `pairs` times, which of them first drawn anew for each pair, after `warmup` untimed runs of each."""
    works = (reference, candidate)
    for _ in range(warmup):
        for work in works:
            work()
    times: tuple[list[float], list[float]] = ([], [])
    order = np.random.default_rng(seed).integers(0, 2, pairs)
    collecting = gc.isenabled()
    gc.disable()
    try:
        for first in order:
            for side in (first, 1 - first):
                times[side].append(milliseconds(works[side], device))
    finally:
        if collecting:
            gc.enable()
    return Pairs(tuple(times[0]), tuple(times[1]))


def milliseconds(work: Callable[[], object], device: torch.device) -> float:
    """Wall-clock time of one run, the device's queue emptied before and after."""
    _synchronize(device)
    start = time.perf_counter()
    work()
    _synchronize(device)
    return 1e3 * (time.perf_counter() - start)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def pin(threads: int) -> None:
    """Keep torch to `threads` threads and, where the system allows, this process to as many processors."""
    torch.set_num_threads(threads)
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])


def ratio(pairs: Pairs, seed: int) -> Estimate:
    """Median of the paired ratios candidate / reference."""
    return _estimate(lambda candidate, reference: np.median(candidate / reference, axis=-1), pairs, seed)


def p95_ratio(pairs: Pairs, seed: int) -> Estimate | None:
    """The candidate's 95th percentile over the reference's; None below P95_STEPS pairs."""
    if len(pairs.reference) < P95_STEPS:
        return None

    def statistic(candidate: np.ndarray, reference: np.ndarray) -> Any:
        return np.percentile(candidate, 95, axis=-1) / np.percentile(reference, 95, axis=-1)

    return _estimate(statistic, pairs, seed)


def percentile(times: tuple[float, ...], q: int) -> float | None:
    """The q-th percentile; None where so few steps can't carry it."""
    needed = {50: 1, 95: P95_STEPS, 99: P99_STEPS}[q]
    return float(np.percentile(times, q)) if len(times) >= needed else None


def _estimate(statistic: Callable[[np.ndarray, np.ndarray], Any], pairs: Pairs, seed: int) -> Estimate:
    candidate, reference = np.array(pairs.candidate), np.array(pairs.reference)
    value = float(statistic(candidate, reference))
    if len(candidate) < 2:
        return Estimate(value, None, None)
    drawn = pairs.draws(RESAMPLES, np.random.default_rng(seed))
    low, high = np.percentile(statistic(candidate[drawn], reference[drawn]), (2.5, 97.5))
    return Estimate(value, float(low), float(high))
