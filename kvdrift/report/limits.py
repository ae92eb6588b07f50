"""The limits that a candidate is held to: the shape of `conf/gates/*.yaml`. Ratios are candidate over reference."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Workload:
    """What the policy is to serve: `batch` sequences of `context` tokens, each answered with `output` more."""

    batch: int
    context: int
    output: int

    @property
    def tokens(self) -> int:
        return self.context + self.output


@dataclass(frozen=True)
class CellLimits:
    """What every cell has to keep: least cosine similarity, and most KL in nats with only that cell quantized."""

    cos: float = 0.98
    kl: float = 0.05


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
        for name in ("max_drift", "confidence"):
            if not 0 < getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must lie between 0 and 1")
        if not self.critical:
            raise ValueError("critical names no cohort; name those whose drift must not pass")
