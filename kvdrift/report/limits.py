"""The limits that a candidate is held to: the shape of `conf/gates/*.yaml`. Ratios are candidate over reference.

A limit that nothing could fail is none: each is refused with a ValueError naming field, value and what is allowed.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvdrift.ranges import require

MOST = 2**31 - 1
MOST_KL = 10.0
"""Nats. The uniform guess over 22,000 tokens is this far from any one of them; what is further apart shares nothing."""


@dataclass(frozen=True)
class Workload:
    """What the policy is to serve: `batch` sequences of `context` tokens, each answered with `output` more."""

    batch: int
    context: int
    output: int

    def __post_init__(self) -> None:
        require(self, batch=(1, MOST), context=(1, MOST), output=(1, MOST))

    @property
    def tokens(self) -> int:
        return self.context + self.output


@dataclass(frozen=True)
class CellLimits:
    """What every cell has to keep: least cosine similarity, and most KL in nats with only that cell quantized."""

    cos: float = 0.98
    kl: float = 0.05

    def __post_init__(self) -> None:
        require(self, cos=(0, 1), kl=(0, MOST_KL))


@dataclass(frozen=True)
class Limits:
    """Every limit of a verdict. KL is in nats, over all scored tokens unless it says otherwise."""

    workload: Workload
    max_bytes_ratio: float
    max_peak_ratio: float
    max_p95_ratio: float
    cell: CellLimits
    max_kl: float
    max_kl_p99: float
    max_cohort_kl: float
    min_same_top1: float
    max_saturated: float
    critical: list[str]
    """Cohorts whose drift is gated."""
    max_drift: float
    confidence: float
    grid: str
    """The cohort that holds the needle grid."""
    min_recall: float
    """Share of the needles that the reference recalls which the candidate has to recall, at each length."""

    def __post_init__(self) -> None:
        from kvdrift.prompts.spec import COHORTS, GRID  # late: the gates' own command line needs none of it

        nats = dict.fromkeys(("max_kl", "max_kl_p99", "max_cohort_kl"), (0.0, MOST_KL))
        shares = dict.fromkeys(("max_bytes_ratio", "min_same_top1", "max_saturated", "min_recall"), (0.0, 1.0))
        ratios = dict.fromkeys(("max_peak_ratio", "max_p95_ratio"), (0.0, 10.0))
        rule = {"max_drift": (0.001, 0.5), "confidence": (0.5, 0.9999)}
        require(self, filled=["critical"], **nats, **shares, **ratios, **rule)
        unknown = sorted({*self.critical, self.grid} - {*COHORTS, GRID})
        if unknown:
            raise ValueError(f"cohort {unknown[0]!r} is unknown; allowed: {', '.join(sorted((*COHORTS, GRID)))}")
        if len(set(self.critical)) < len(self.critical):
            raise ValueError(f"critical is {self.critical}; name each cohort once")
