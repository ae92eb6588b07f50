"""Where in a sequence the error lies: position, distance from the current token, region, role, and generated step."""

from __future__ import annotations

from typing import Any

import numpy as np
import polars as pl

from kvdrift.measure.buckets import bucket_starts
from kvdrift.prompts.prompt import GENERATED, REGIONS
from kvdrift.report.evidence import by_tokens, finite, logits_summary

FIGURES = ("key_logits", "jensen_shannon", "value_output", "combined_error")
"""What attention makes of a slice that alone is quantized: its keys by the first two, its values, both."""
SLICES = ("position", "distance", "region", "role")
FIRST_STEPS = 8
"""Generated steps are told in octaves: the first eight, then twice as many each time."""


def slice_rows(errors: pl.DataFrame | None, attention: pl.DataFrame | None) -> list[dict[str, Any]]:
    """A row a slice {slice, at, prompts, key_error, value_error, FIGURES}; what was not measured is None.

    `slice` is one of SLICES; `at` the bucket's first token, the region (prompt or generated), or the role. Errors are
    relative L2, means over packed tokens; a distance has none, since it differs from query to query. FIGURES are means
    over layers and those `prompts` of which some of the slice was read packed.
    """
    found: dict[tuple[str, Any], dict[str, Any]] = {}
    if errors is not None:
        prompt, behind = map(pl.lit, REGIONS)
        errors = errors.with_columns(region=pl.when(pl.col("role") == GENERATED).then(behind).otherwise(prompt))
    for kind in SLICES:
        column = "role" if kind in ("region", "role") else "bucket"  # of the attention table
        if attention is not None:
            rows = attention.filter(slice=kind).drop_nulls("key_logits")
            figures = pl.col("prompt").n_unique().cast(pl.Int64).alias("prompts"), pl.col(FIGURES).mean()
            for row in rows.group_by(column, maintain_order=True).agg(figures).to_dicts():
                found[kind, row.pop(column)] = row
        if errors is not None and kind != "distance":
            own = "region" if kind == "region" else column
            for row in errors.group_by(own, "tensor", maintain_order=True).agg(by_tokens("rel_l2")).to_dicts():
                found.setdefault((kind, row[own]), {})[f"{row['tensor']}_error"] = finite(row["rel_l2"])
    nothing = dict.fromkeys(("prompts", "key_error", "value_error", *FIGURES))
    return [
        {"slice": kind, "at": at} | nothing | row
        for (kind, at), row in sorted(found.items(), key=lambda item: (SLICES.index(item[0][0]), item[0][1]))
    ]


def logits_rows(logits: pl.DataFrame | None) -> list[dict[str, Any]]:
    """Next-token figures by the position of the scored token: a row an octave {first, ...} of `logits_summary`."""
    if logits is None or logits.is_empty():
        return []
    positions = logits["position"].to_numpy()
    starts = bucket_starts(int(positions.max()) + 1)
    octaves = np.searchsorted(starts, positions, side="right") - 1
    parts = logits.with_columns(octave=octaves).partition_by("octave", as_dict=True)
    return [{"first": starts[octave]} | logits_summary(parts[octave,]) for (octave,) in sorted(parts)]


def step_rows(generations: pl.DataFrame | None) -> list[dict[str, Any]]:
    """KL in nats by generated step {first, tokens, prompts, kl}, in octaves: do errors compound?

    Over the prompts with the longest answers, along what the candidate said; none where it said nothing.
    """
    if generations is None:
        return []
    longest = generations.drop_nulls("step_kl").select("prompt", "step_kl")
    if longest.is_empty():
        return []
    steps = longest.with_columns(step=pl.int_ranges(pl.col("step_kl").list.len())).explode("step_kl", "step")
    steps = steps.drop_nulls("step_kl")
    doubled = 2 ** pl.col("step").cast(pl.Float64).log(2).floor()
    octave = pl.when(pl.col("step") < FIRST_STEPS).then(0.0).otherwise(doubled).cast(pl.Int64)
    rows = steps.with_columns(first=octave).group_by("first", maintain_order=True)
    kl = {"tokens": pl.len().cast(pl.Int64), "prompts": pl.col("prompt").n_unique().cast(pl.Int64)}
    return rows.agg(**kl, kl=pl.col("step_kl").mean()).sort("first").to_dicts()
