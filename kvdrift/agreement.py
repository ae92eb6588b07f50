"""What must hold between the stages' configurations, the corpus and the model; each alone is sound already.

Stages are known by the names of their keys, and looked at where they are there.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from kvdrift.prompts.batches import MOST_TOKENS
from kvdrift.prompts.items import CRITICAL
from kvdrift.prompts.spec import GRID, CorpusSpec
from kvdrift.prompts.structured import STRUCTURED


def disagreements(
    stages: Mapping[str, Any], files: Mapping[str, str], spec: CorpusSpec, positions: int, device: str
) -> Iterator[str]:
    """A line for each thing that one setting asks for and another can't give. `files` maps a group to its YAML."""
    yield from _cohorts(stages, files, spec)
    yield from _workload(stages, files, positions)
    if "latency" in stages and stages["latency"].latency.capacity.budget_mib is None and device == "cpu":
        yield (
            f"{files['latency']}: capacity.budget_mib is null, which is a GPU's free memory, but the device is cpu; "
            "allowed here: a number of MiB."
        )
    shapes: Counter[tuple[int, int, int]] = Counter()
    for each in spec.cohorts.values():
        for length, count in each.prompts.items():
            shapes[length, each.continuation, each.max_new_tokens] += count
    if not any(count > 1 and 2 * length <= MOST_TOKENS for (length, *_), count in shapes.items()):
        yield (
            f"{files['corpus']}: no two prompts run in one batch, which the noise floor is measured on; give a cohort "
            f"two prompts or more of one length up to {MOST_TOKENS // 2:,} tokens."
        )


def _cohorts(stages: Mapping[str, Any], files: Mapping[str, str], spec: CorpusSpec) -> Iterator[str]:
    """Cohorts that stages name are in the corpus and long enough, and those whose answers are gated have answers."""
    there = [*spec.cohorts, GRID]
    for stage, key, counted in (
        ("sensitivity", "cohorts", "steps"),
        ("search", "cohorts", "steps"),
        ("logits", "probes", "probe_steps"),
    ):
        if stage not in stages:
            continue
        named, steps = getattr(stages[stage], key), getattr(stages[stage], counted)
        for cohort in sorted({cohort for cohort in named if named.count(cohort) > 1}):
            yield f"conf/{stage}.yaml: {key} names {cohort!r} twice; remove one."
        for cohort in named:
            if cohort not in there:
                yield (
                    f"conf/{stage}.yaml: {key} names {cohort!r}, which {files['corpus']} has not; "
                    f"allowed: {', '.join(there)}."
                )
                continue
            scored = (spec.needle_grid if cohort == GRID else spec.cohorts[cohort]).continuation - 1
            if steps > scored:
                yield (
                    f"conf/{stage}.yaml: {counted} is {steps}; allowed: at most {scored}, which {files['corpus']} "
                    f"scores of {cohort}. Lower it, or lengthen that continuation."
                )
    gates = stages["verdict"].gates if "verdict" in stages else None
    answered = [cohort for cohort in there if cohort in CRITICAL or cohort in STRUCTURED or cohort == GRID]
    for cohort in gates.critical if gates else ():
        if cohort not in answered:
            yield (
                f"{files['gates']}: critical names {cohort!r}, which has no answers in {files['corpus']}; "
                f"allowed: {', '.join(answered)}."
            )
    if gates and gates.grid != GRID:
        yield f"{files['gates']}: grid is {gates.grid!r}; allowed: {GRID}, the one cohort with depths."


def _workload(stages: Mapping[str, Any], files: Mapping[str, str], positions: int) -> Iterator[str]:
    """The target workload fits into the model and the scheduler."""
    if "verdict" in stages:
        load = stages["verdict"].gates.workload
        if load.context + load.output > positions:
            yield (
                f"{files['gates']}: workload asks for {load.context} + {load.output} tokens; the model has {positions} "
                "positions. Shorten context or output."
            )
    if "latency" in stages:
        sweep, load, limit = (
            stages["latency"].latency,
            stages["latency"].workload,
            stages["latency"].scheduler.batch_limit,
        )
        if load.batch > limit:
            yield (
                f"{files['gates']}: workload.batch is {load.batch}; allowed: 1 to {limit}, "
                f"{files['scheduler']}'s batch_limit."
            )
        if min(sweep.batches) > limit:
            yield (
                f"{files['latency']}: batches is {sweep.batches}; allowed: at least one up to {limit}, "
                f"{files['scheduler']}'s batch_limit."
            )


def doubts(stages: Mapping[str, Any], files: Mapping[str, str], spec: CorpusSpec) -> Iterator[str]:
    """A line for each critical cohort with too few items to pass, were every one of them right and none drifted."""
    if "verdict" not in stages:
        return
    gates = stages["verdict"].gates
    needed = math.ceil(math.log(1 - gates.confidence) / math.log(1 - gates.max_drift))
    for cohort in gates.critical:
        items = sum(spec.cohorts[cohort].prompts.values()) if cohort in spec.cohorts else needed
        if items < needed:
            yield (
                f"{files['gates']}: critical cohort {cohort} has {items} items in {files['corpus']}; it takes {needed} "
                f"to show a drift of at most {gates.max_drift:g}, so no candidate can pass."
            )
