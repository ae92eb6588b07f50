"""Statistics of paired measurements: intervals, tests of outcomes, and the rule by which a cohort passes.

This file knows arrays and counts. It knows no policy, no prompt and no file.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
from jaxtyping import Float64, Shaped
from scipy.stats import beta, binomtest

CONFIDENCE = 0.95
RESAMPLES = 1000
TAIL_SAMPLES = 10
"""Samples that must lie beyond a percentile for it to be given: 1,000 values carry a p99, 10,000 a p99.9."""


@dataclass(frozen=True)
class Interval:
    """A mean and its two-sided confidence interval."""

    mean: float
    low: float
    high: float


def mean_interval(
    values: Float64[np.ndarray, " n"], clusters: Shaped[np.ndarray, " n"] | None = None, seed: int = 0
) -> Interval | None:
    """The mean of `values` with its bootstrap percentile interval (Efron 1979); None without values.

    Values of one cluster (the tokens of one prompt) are resampled together, since they aren't independent; one
    cluster alone carries no interval (NaN). A value that isn't finite stays visible as NaN.
    """
    if not values.size:
        return None
    _, groups = np.unique(np.arange(values.size) if clusters is None else clusters, return_inverse=True)
    sums, sizes = np.bincount(groups, weights=values), np.bincount(groups)
    draws = np.random.default_rng(seed).integers(sums.size, size=(RESAMPLES, sums.size))
    means = sums[draws].sum(1) / sizes[draws].sum(1)
    edge = (1 - CONFIDENCE) / 2
    known = sums.size > 1 and bool(np.isfinite(means).all())
    low, high = np.quantile(means, [edge, 1 - edge]) if known else (math.nan, math.nan)
    return Interval(float(values.mean()), float(low), float(high))


def percentile(values: Float64[np.ndarray, " n"], q: float) -> float | None:
    """The `q` quantile, 0 < q < 1; None where fewer than TAIL_SAMPLES values lie beyond it."""
    if values.size * (1 - q) < TAIL_SAMPLES - 1e-6:
        return None
    return float(np.quantile(values, q))


def mcnemar(worse: int, better: int) -> float:
    """Two-sided exact McNemar p-value of `worse` pairs that got wrong against `better` that got right (1947)."""
    pairs = worse + better
    return float(binomtest(worse, pairs).pvalue) if pairs else 1.0


def drift_bound(drifted: int, items: int, confidence: float = CONFIDENCE) -> float:
    """One-sided upper Clopper–Pearson bound (1934) on the rate of drift; 1 without items or when all drifted."""
    if not 0 <= drifted <= items:
        raise ValueError(f"drifted is {drifted} of {items} items; it must lie between 0 and their number")
    return float(beta.ppf(confidence, drifted + 1, items - drifted)) if drifted < items else 1.0


def items_needed(drifted: int, items: int, limit: float, confidence: float = CONFIDENCE) -> int:
    """How many more items, none of which may drift, bring the bound within `limit`; 0 if it is within it already."""
    if not 0 < limit < 1:
        raise ValueError(f"limit is {limit}; a rate of drift to stay under lies between 0 and 1")
    low, high = items, max(items, 1)
    if drift_bound(drifted, items, confidence) <= limit:
        return 0
    while drift_bound(drifted, high, confidence) > limit:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if drift_bound(drifted, middle, confidence) > limit else (low, middle)
    return high - items


@dataclass(frozen=True)
class Drift:
    """The outcome of one cohort under the pass rule."""

    drifted: int
    items: int
    bound: float
    status: Literal["pass", "fail", "inconclusive"]
    needed: int
    """More items without a drift that would make an inconclusive cohort pass; 0 unless it is inconclusive."""


def drift(drifted: int, items: int, limit: float, confidence: float = CONFIDENCE) -> Drift:
    """Pass if the bound on the rate is within `limit`; fail if the rate seen exceeds it; else inconclusive."""
    bound = drift_bound(drifted, items, confidence)
    if bound <= limit:
        return Drift(drifted, items, bound, "pass", 0)
    if drifted > limit * items:
        return Drift(drifted, items, bound, "fail", 0)
    return Drift(drifted, items, bound, "inconclusive", items_needed(drifted, items, limit, confidence))
