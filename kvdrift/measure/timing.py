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
    """Milliseconds of the same step on the reference path and on the candidate, pair by pair."""

    reference: tuple[float, ...]
    candidate: tuple[float, ...]


@dataclass(frozen=True)
class Estimate:
    """A figure with its 95 % bootstrap interval, which one pair alone does not have."""

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
    return Pairs(*map(tuple, times))


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
    return _bootstrap(np.median, seed, np.divide(pairs.candidate, pairs.reference))


def p95_ratio(pairs: Pairs, seed: int) -> Estimate | None:
    """The candidate's 95th percentile over the reference's; None below P95_STEPS pairs."""
    if len(pairs.reference) < P95_STEPS:
        return None

    def statistic(candidate: Any, reference: Any, axis: int) -> Any:
        return np.percentile(candidate, 95, axis=axis) / np.percentile(reference, 95, axis=axis)

    return _bootstrap(statistic, seed, pairs.candidate, pairs.reference)


def percentile(times: tuple[float, ...], q: int) -> float | None:
    """The q-th percentile; None where so few steps can't carry it."""
    needed = {50: 1, 95: P95_STEPS, 99: P99_STEPS}[q]
    return float(np.percentile(times, q)) if len(times) >= needed else None


def _bootstrap(statistic: Callable[..., Any], seed: int, *data: Any) -> Estimate:
    from scipy.stats import bootstrap

    value = float(statistic(*(np.asarray(x) for x in data), axis=0))
    if len(data[0]) < 2:
        return Estimate(value, None, None)
    found = bootstrap(
        data, statistic, n_resamples=RESAMPLES, paired=True, vectorized=True, method="percentile", rng=seed
    ).confidence_interval
    return Estimate(value, float(found.low), float(found.high))
