"""What a latency sweep measures: the target workload, and the settings around it. It runs nothing."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from kvdrift.ranges import require

P95_STEPS = 20
"""Fewer steps than this can't carry a 95th percentile."""
P99_STEPS = 1000
"""A 99th percentile is reported only from this many steps on."""

Reuse = Literal["fresh", "shared_prefix", "continued_session", "evicted"]


@dataclass(frozen=True)
class Workload:
    """`workload` of `conf/gates/*.yaml`: the service that a release is judged by. Sequences, prompt and new tokens."""

    batch: int
    context: int
    output: int

    def __post_init__(self) -> None:
        require(self, batch=(1, math.inf), context=(1, math.inf), output=(1, math.inf))


@dataclass(frozen=True)
class Scheduler:
    """`conf/scheduler/*.yaml`: how requests reach the cache."""

    batch_limit: int
    """The most sequences decoded together."""
    prefill_chunk: int
    """Tokens of one prefill step; 0 prefills a prompt in one."""
    eviction: Literal["none", "oldest"]
    """When pages run out: reject the newcomer, or evict the oldest sequence, to be rebuilt later."""

    def __post_init__(self) -> None:
        require(self, batch_limit=(1, 4096), prefill_chunk=(0, math.inf))


@dataclass(frozen=True)
class CapacityTrial:
    """`budget_mib` null is 80 % of the GPU's free memory. `steps` are decoded by every admitted sequence."""

    budget_mib: int | None
    steps: int

    def __post_init__(self) -> None:
        require(self, budget_mib=(1, 2**24), steps=(1, 100_000))


@dataclass(frozen=True)
class Sweep:
    """`conf/latency/*.yaml`. A context beyond the longest stored prompt is measured at that prompt's length."""

    contexts: list[int]
    batches: list[int]
    outputs: list[int]
    """Generation lengths besides the workload's, at its batch and context."""
    grid: Literal["factors", "full"]
    """`factors` varies one setting at a time around the workload; `full` crosses batches and contexts."""
    pairs: int
    """Paired decode steps of a point other than the workload's own, which has as many as it has output tokens."""
    visits: int
    """How often the sweep comes by a point, its caches filled anew, to take its share of the pairs."""
    prefill_contexts: list[int]
    prefill_pairs: int
    reuse: list[Reuse]
    turn: int
    """Tokens of a continued session's next turn."""
    cold_starts: int
    """Forked children before their first forward pass; 0 measures none."""
    peers: list[Literal["static", "quanto", "hqq"]]
    """Transformers' other caches, measured on the workload."""
    capacity: CapacityTrial

    def __post_init__(self) -> None:
        tokens, steps = (1, math.inf), (1, 100_000)
        require(
            self,
            filled=("contexts", "batches"),
            contexts=tokens,
            batches=(1, 4096),
            outputs=steps,
            pairs=(2, 100_000),
            visits=(1, 100),
            prefill_contexts=tokens,
            prefill_pairs=steps,
            turn=tokens,
            cold_starts=(0, 1000),
        )


@dataclass(frozen=True)
class Point:
    """One setting: `batch` sequences of `context` tokens, `generated` decode steps or as many prefills."""

    batch: int
    context: int
    generated: int
    phase: Literal["prefill", "decode"] = "decode"
    reuse: Reuse = "fresh"

    @property
    def name(self) -> str:
        return f"{self.phase}-{self.reuse}-b{self.batch}-c{self.context}-n{self.generated}"

    def share(self, visits: int) -> Point:
        """The same setting with one visit's part of the steps, rounded up."""
        return replace(self, generated=-(-self.generated // visits))


def target(workload: Workload, longest: int) -> Point:
    """The workload's own setting, with enough steps for a 95th percentile."""
    return Point(workload.batch, min(workload.context, longest), max(workload.output, P95_STEPS))


def points(sweep: Sweep, workload: Workload, scheduler: Scheduler, longest: int) -> list[Point]:
    """Every setting of a sweep once, the workload's own first. `longest` is the longest stored prompt.

    A batch other than the workload's is measured at the shortest context too, so that it has a line in length.
    """
    first = target(workload, longest)
    contexts = sorted({min(c, longest) for c in sweep.contexts} | {first.context})
    batches = [b for b in sweep.batches if b <= scheduler.batch_limit]
    found = [first, *(Point(first.batch, first.context, n) for n in sweep.outputs)]
    if sweep.grid == "full":
        crossed = [(b, c) for b in batches for c in contexts]
    else:
        crossed = [(first.batch, c) for c in contexts]
        crossed += [(b, c) for b in batches for c in (contexts[0], first.context)]
    found += [Point(b, c, sweep.pairs) for b, c in crossed if (b, c) != (first.batch, first.context)]
    prefills = sorted({min(c, longest) for c in sweep.prefill_contexts})
    found += [Point(first.batch, c, sweep.prefill_pairs, "prefill") for c in prefills]
    for reuse in sweep.reuse:
        if reuse == "shared_prefix":
            found.append(Point(max(batches), first.context, sweep.pairs, "decode", reuse))
        elif reuse == "continued_session":
            found.append(Point(first.batch, first.context, sweep.prefill_pairs, "prefill", reuse))
            found.append(Point(first.batch, first.context, sweep.pairs, "decode", reuse))
        elif reuse == "evicted":
            found.append(Point(1, first.context, sweep.prefill_pairs, "prefill", reuse))
    return list(dict.fromkeys(found))
