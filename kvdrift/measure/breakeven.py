"""The length from which the packed cache is faster: inter-token latency fitted as a line in length, on both paths."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from kvdrift.measure.timing import Pairs

Verdict = Literal["always", "never", "crosses"]


@dataclass(frozen=True)
class Line:
    """Inter-token latency = intercept + slope · length, in milliseconds and milliseconds a token."""

    intercept: float
    slope: float


@dataclass(frozen=True)
class BreakEven:
    """Where the candidate's line goes below the reference's.

    `tokens` is 0 when the candidate is faster at every length up to the limit ("always") and None when it is faster at
    none, or only below some length ("never": no minimum length helps). `low` and `high` bound the crossing at 95 %
    among the resamples that cross; `confidence` is the share of resamples with this verdict.
    """

    verdict: Verdict
    tokens: int | None
    low: int | None
    high: int | None
    confidence: float
    reference: Line
    candidate: Line


def break_even(points: Mapping[int, Pairs], limit: int, seed: int, resamples: int = 2000) -> BreakEven:
    """Fit both lines through the medians at each length and cross them; pairs are resampled within their length.

    `points` maps a length to its paired steps; at least two lengths. `limit` is the longest length that counts.
    """
    if len(points) < 2:
        raise ValueError(f"a line needs two lengths; measured: {sorted(points)}")
    lengths = np.array(sorted(points), dtype=float)
    measured = [points[int(n)] for n in lengths]
    times = [np.array([pairs.reference, pairs.candidate]) for pairs in measured]
    rng = np.random.default_rng(seed)
    drawn_times = [t[:, pairs.draws(resamples, rng)] for t, pairs in zip(times, measured, strict=True)]
    resampled = np.stack([np.median(t, axis=-1) for t in drawn_times], axis=-1)  # [path, resample, length]
    reference, candidate = (_fit(lengths, np.array([np.median(t[path]) for t in times])) for path in (0, 1))
    verdict, tokens = crossing(reference, candidate, limit)
    drawn = [crossing(_fit(lengths, r), _fit(lengths, c), limit) for r, c in zip(*resampled, strict=True)]
    crossed = [n for v, n in drawn if v == "crosses" and n is not None]
    low, high = (int(np.percentile(crossed, q)) for q in (2.5, 97.5)) if crossed else (None, None)
    confidence = sum(v == verdict for v, _ in drawn) / len(drawn)
    return BreakEven(verdict, tokens, low, high, confidence, reference, candidate)


def crossing(reference: Line, candidate: Line, limit: int) -> tuple[Verdict, int | None]:
    """The verdict for lengths 1 … limit, and the length from which the candidate is faster."""
    intercept, slope = candidate.intercept - reference.intercept, candidate.slope - reference.slope
    if intercept + slope * limit >= 0:
        return "never", None
    if intercept + slope < 0:
        return "always", 0
    return "crosses", int(np.ceil(-intercept / slope))


def _fit(lengths: np.ndarray, times: np.ndarray) -> Line:
    """Least squares."""
    slope = np.cov(lengths, times, bias=True)[0, 1] / np.var(lengths)
    return Line(float(times.mean() - slope * lengths.mean()), float(slope))
