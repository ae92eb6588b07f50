"""The noise floor, to read: the reference against itself under other batch sizes, thread counts and chunks."""

from __future__ import annotations

from typing import Any

import polars as pl

from kvdrift.report.evidence import logits_summary


def noise_floor(scored: pl.DataFrame | None, answered: pl.DataFrame | None) -> dict[str, Any]:
    """`logits` maps a schedule to its summary of next-token figures; `answers` has a row a schedule {schedule, answers,
    changed, outcomes}: greedy answers given again, how many came out otherwise, and how many otherwise right or wrong.
    """
    logits = {} if scored is None else scored.partition_by("schedule", as_dict=True, maintain_order=True)
    counts = {
        "answers": pl.len().cast(pl.Int64),
        "changed": pl.col("first_divergence").is_not_null().sum().cast(pl.Int64),
        "outcomes": (pl.col("correct") != pl.col("correct_reference")).sum().cast(pl.Int64),
    }
    answers = [] if answered is None else answered.group_by("schedule", maintain_order=True).agg(**counts).to_dicts()
    return {"logits": {name: logits_summary(rows) for (name,), rows in logits.items()}, "answers": answers}
