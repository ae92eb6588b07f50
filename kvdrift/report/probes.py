"""What the probe quantizers do to single cells, from the sensitivity map: keys alone, values alone, and both."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import polars as pl

from kvdrift.measure.buckets import TENSORS
from kvdrift.report.reading import UNREADABLE
from kvdrift.report.strict import Number
from kvdrift.report.tables import table_fault

WORST = 5
NOISE = 1e-3
"""How far rounding may carry a figure beyond its range."""
COLUMNS = {
    **dict.fromkeys(("prompt", "probe", "policy", "tensor"), pl.String),
    "needle": pl.Boolean,
    "layer": Number(0, whole=True),
    **dict.fromkeys(("bucket", "start", "stop"), Number(0, whole=True, or_null=True)),
    "kl": Number(-NOISE, or_null=True),
    **dict.fromkeys(("same_top1", "kept"), Number(0, 1, or_null=True)),
    **dict.fromkeys(("rank_correlation", "cosine"), Number(-1 - NOISE, 1 + NOISE, or_null=True)),
    "error": Number(0, or_null=True),
}
KEY = ("prompt", "needle", "probe", "layer", "tensor", "bucket")
SHOWN = ["layer", "start", "stop", "kl", "cosine", "error", "same_top1", "rank_correlation", "prompt"]
"""What is told of a cell, each figure that of the prompt which shows it worst."""


def read_cells(path: Path, layers: int) -> pl.DataFrame | None:
    """The sensitivity map of a model with so many layers; None, which is not measured, if it is missing, damaged,
    incomplete or impossible."""
    try:
        cells = pl.read_parquet(path)
        return None if table_fault(cells, COLUMNS, KEY) or not _possible(cells, layers) else cells
    except UNREADABLE:
        return None


def _possible(cells: pl.DataFrame, layers: int) -> bool:
    """Known tensors, spans that run forwards, figures just where something is packed, and every layer in its place."""
    packed = pl.col("start").is_not_null()
    spans = packed == pl.col("stop").is_not_null(), (pl.col("start") < pl.col("stop")).fill_null(True)
    figures = packed == pl.col("kl").is_not_null()
    rules = pl.all_horizontal(pl.col("tensor").is_in(TENSORS), pl.col("layer") < layers, *spans, figures)
    measured = cells.filter(~pl.col("needle")).group_by("prompt", "probe", "tensor").agg(pl.col("layer").n_unique())
    one_policy = cells.select("probe", "policy").unique()
    return (
        bool(cells.select(rules.all()).item())
        and not measured.is_empty()
        and bool((measured["layer"] == layers).all())
        and one_policy.height == one_policy["probe"].n_unique() == one_policy["policy"].n_unique()
    )


def probe_rows(cells: pl.DataFrame | None) -> list[dict[str, Any]]:
    """A row a (probed policy, tensor) that was measured cell by cell.

    `cells` counts them, `alone` is the KL of each layer alone summed over layers, in nats, mean over prompts. `needles`
    prompts were asked for their answer in `asked` cells: `kept` is the share of its tokens kept, mean over all of
    these, `least` the cell that keeps least, as {layer, start, stop, kept}; None where nothing was asked. `worst` holds
    the cells of the largest KL, then the one that keeps least if it loses any; each has SHOWN, and its own `kept` and
    `needles`.
    """
    if cells is None:
        return []
    by_bucket = cells.filter(pl.col("bucket").is_not_null(), pl.col("kl").is_not_null())
    rows = []
    for (probe, policy, tensor), own in by_bucket.group_by("probe", "policy", "tensor", maintain_order=True):
        whole = cells.filter(~pl.col("needle"), probe=probe, tensor=tensor).filter(pl.col("bucket").is_null())
        alone = whole.group_by("prompt").agg(pl.col("kl").sum())["kl"].sort().mean()
        asked = own.filter("needle", pl.col("kept").is_not_null())
        kept = asked.group_by("layer", "bucket", "start", "stop").agg(pl.col("kept").mean(), needles=pl.len())
        kept = kept.sort("kept", "layer", "bucket")
        told = own.filter(~pl.col("needle")).sort("kl", "prompt", "layer", "bucket", descending=[True, *[False] * 3])
        told = told.unique(["layer", "bucket"], keep="first", maintain_order=True)
        named = kept.head(1).filter(pl.col("kept") < 1)
        named = told.join(named, on=["layer", "bucket"], how="semi", maintain_order="left")
        worst = pl.concat([told.head(WORST), named]).unique(["layer", "bucket"], keep="first", maintain_order=True)
        own_kept = kept.drop("start", "stop")
        worst = worst.drop("kept").join(own_kept, on=["layer", "bucket"], how="left", maintain_order="left")
        row: dict[str, Any] = {"policy": policy, "tensor": tensor, "cells": told.height, "alone": _finite(alone)}
        row |= {"needles": asked["prompt"].n_unique(), "asked": kept.height}
        row |= {
            "kept": asked["kept"].mean(),
            "least": next(iter(kept.select("layer", "start", "stop", "kept").to_dicts()), None),
        }
        rows.append(row | {"worst": worst.select(*SHOWN, "kept", "needles").to_dicts()})
    return sorted(rows, key=lambda row: (row["policy"], TENSORS.index(row["tensor"])))


def _finite(value: Any) -> float | None:
    return value if value is not None and math.isfinite(value) else None
