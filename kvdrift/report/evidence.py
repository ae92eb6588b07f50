"""What the stages measured about one policy, and the figures and tables that gates and reports go by.

What was not measured is None, and so is every figure that needs it: judging that is the gates' business.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from kvdrift.ledger import CacheShape, Ledger, account
from kvdrift.measure.stats import Drift, drift, mcnemar, mean_interval, percentile
from kvdrift.policy import CachePolicy
from kvdrift.report import strict

GREEDY = "greedy"
"""The mode whose outcomes count as drift; sampled generations are reported beside it."""

SUMMARY = ["tokens", "kl", "kl_low", "kl_high", "kl_p99", "kl_p999", "kl_max"]
SUMMARY += ["same_top1", "rms_delta_p", "rank_correlation", "perplexity_change"]


ATTENTION = ["jensen_shannon", "top_overlap", "value_output", "combined_error"]
"""Key geometry by the first two (weights, and the top positions kept), then values alone, then both, on the output."""
APART = ["jensen_shannon", "value_output", "combined_error"]
"""What a cell alone does to attention: its keys to the weights, its values to the output, and both to the output."""


@dataclass(frozen=True)
class Evidence:
    """One policy and all that is known about it.

    `prompts` holds what was to be measured, a row an evaluation prompt {prompt, cohort, task, batch, answer, depth,
    scored, length, attack}; `attack` marks those that the attack found. `faults` maps what can't be used to the reason.
    """

    policy: CachePolicy
    shape: CacheShape
    prompts: pl.DataFrame
    packing: Mapping[str, Any] | None
    errors: pl.DataFrame | None
    attention: pl.DataFrame | None
    logits: pl.DataFrame | None
    cells: pl.DataFrame | None
    generations: pl.DataFrame | None
    latency: Mapping[str, Any] | None
    drill: Mapping[str, Any] | None
    faults: Mapping[str, str] = field(default_factory=dict)


def read_json(path: Path) -> Any:
    """The content of a JSON file, None if there is no such file. Raises ValueError, naming it, if it can't be read."""
    return strict.read(path, finite=True) if path.is_file() else None


def at_workload(evidence: Evidence, tokens: int, batch: int) -> Ledger:
    """The ledger of `batch` sequences of `tokens` tokens with packing on, whatever its break-even."""
    return account(evidence.policy, evidence.shape, tokens, batch)


def logits_summary(logits: pl.DataFrame | None) -> dict[str, Any]:
    """KL in nats (mean with interval, p99, p99.9, max), agreement, probabilities; every figure None without rows."""
    if logits is None or logits.is_empty():
        return dict.fromkeys(SUMMARY)
    names = ("kl", "same_top1", "delta_p", "rank_correlation", "nll", "nll_reference")
    columns = {name: logits[name].cast(pl.Float64).fill_null(math.nan).to_numpy() for name in names}
    mean = mean_interval(columns["kl"], logits["prompt"].to_numpy())
    assert mean is not None
    perplexities = np.exp(columns["nll"].mean()), np.exp(columns["nll_reference"].mean())
    found: dict[str, Any] = {
        "kl": mean.mean,
        "kl_low": mean.low,
        "kl_high": mean.high,
        "kl_p99": percentile(columns["kl"], 0.99),
        "kl_p999": percentile(columns["kl"], 0.999),
        "kl_max": float(columns["kl"].max()),
        "same_top1": float(columns["same_top1"].mean()),
        "rms_delta_p": float(np.sqrt(np.square(columns["delta_p"]).mean())),
        "rank_correlation": float(columns["rank_correlation"].mean()),
        "perplexity_change": float(perplexities[0] - perplexities[1]),
    }
    return {"tokens": logits.height} | {name: finite(value) for name, value in found.items()}


def interaction(evidence: Evidence) -> list[dict[str, Any]]:
    """Whether isolated effects add up: a row a probe prompt {prompt, predicted, measured}, mean KL in nats.

    `predicted` is the sum over its cells alone; `measured` is the whole stack on the same prompt, all its scored
    tokens, in the model's own dtype, so that it also holds rounding noise.
    """
    cells, logits = evidence.cells, evidence.logits
    if cells is None or logits is None:
        return []
    predicted = cells.drop_nulls("kl").group_by("prompt", maintain_order=True).agg(predicted=pl.col("kl").sum())
    # sorted, so that a group is summed as a whole: threads that each sum a part end in no fixed order
    kl = pl.col("kl").cast(pl.Float64).sort()
    measured = logits.group_by("prompt", maintain_order=True).agg(measured=kl.mean())
    return predicted.join(measured, on="prompt", how="inner", maintain_order="left").to_dicts()


def finite(value: Any) -> Any:
    """`value`, or None in place of a number that isn't finite: what JSON, and a gate, take for not measured."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def cell_table(evidence: Evidence) -> list[dict[str, Any]]:
    """A row a cell {layer, bucket, pos, key_cosine, value_cosine, cos, kl, prompt, APART}, by layer and bucket.

    Cosines are means over all packed tokens of the cell, `cos` the lesser of keys and values; `kl` is that of the
    probe prompt which shows it worst, named by `prompt`. Every packed layer has a row in each bucket that any of them
    reaches, so what was measured for one layer only shows up as missing for the others. APART are means over prompts.
    """
    apart: dict[tuple[int, int], dict[str, Any]] = {}
    if evidence.attention is not None:
        means = (
            evidence.attention.filter(slice="position")
            .group_by("layer", "bucket", maintain_order=True)
            .agg(pl.col(APART).mean())
        )
        apart = {(row.pop("layer"), row.pop("bucket")): row for row in means.to_dicts()}
    nothing = dict.fromkeys(APART)
    cosines: dict[tuple[int, int, str], float | None] = {}
    if evidence.errors is not None:
        found = evidence.errors.group_by("layer", "bucket", "tensor", maintain_order=True).agg(by_tokens("cosine"))
        cosines = {(row["layer"], row["bucket"], row["tensor"]): finite(row["cosine"]) for row in found.to_dicts()}
    kls: dict[tuple[int, int], tuple[float | None, str]] = {}
    if evidence.cells is not None:
        rows = evidence.cells.filter(pl.col("tensor") == "both", pl.col("kl").is_not_null())
        for row in rows.sort("kl", "prompt", descending=[False, True]).to_dicts():
            kls[row["layer"], row["bucket"]] = finite(row["kl"]), row["prompt"]
    buckets = sorted({key[1] for key in cosines} | {key[1] for key in kls})
    table = []
    for layer, quantizers in enumerate(evidence.policy.layers):
        for bucket in () if quantizers.is_exact else buckets:
            key, value = (cosines.get((layer, bucket, tensor)) for tensor in ("key", "value"))
            kl, prompt = kls.get((layer, bucket), (None, None))
            cos = None if key is None or value is None else min(key, value)
            row = {"layer": layer, "bucket": bucket, "pos": bucket, "key_cosine": key, "value_cosine": value}
            row |= {"cos": cos, "kl": kl, "prompt": prompt}
            table.append(row | apart.get((layer, bucket), nothing))
    return table


def layer_map(evidence: Evidence, cells: Sequence[Mapping[str, Any]], tokens: int, batch: int) -> list[dict[str, Any]]:
    """A row a layer: bits of keys and values, bytes saved at the workload, cosines, relative errors, KL, latency share.

    Cosine, error and KL are those of the layer's worst bucket, what attention makes of them (ATTENTION) is the mean
    over all prompts; an exact layer has none. `latency_share` is of the time that all layers' attention takes in a
    decode step of the workload.
    """
    errors: dict[tuple[int, str], float | None] = {}
    if evidence.errors is not None and not evidence.errors.is_empty():
        by_bucket = evidence.errors.group_by("layer", "tensor", "bucket", maintain_order=True).agg(by_tokens("rel_l2"))
        found = by_bucket.group_by("layer", "tensor", maintain_order=True).agg(pl.col("rel_l2").sort().last())
        errors = {(row["layer"], row["tensor"]): finite(row["rel_l2"]) for row in found.to_dicts()}
    attention: dict[int, dict[str, Any]] = {}
    if evidence.attention is not None:
        means = (
            evidence.attention.filter(slice="layer")
            .group_by("layer", maintain_order=True)
            .agg(pl.col(ATTENTION).mean())
        )
        attention = {row.pop("layer"): row for row in means.to_dicts()}
    times = (evidence.latency or {}).get("attention_ms")
    single, exact_bits = replace(evidence.shape, layers=1), 8 * evidence.shape.dtype_bytes
    rows = []
    for layer, quantizers in enumerate(evidence.policy.layers):
        ledger = account(replace(evidence.policy, layers=(quantizers,)), single, tokens, batch)
        row: dict[str, Any] = {"layer": layer, "saved_bytes": ledger.reference - ledger.format_bytes}
        for tensor, quantizer in (("key", quantizers.key), ("value", quantizers.value)):
            row[f"{tensor}_bits"] = exact_bits if quantizer is None else quantizer.bits
            row[f"{tensor}_error"] = errors.get((layer, tensor))
        own = [cell for cell in cells if cell["layer"] == layer]
        for name, worst in (("key_cosine", min), ("value_cosine", min), ("kl", max)):
            figures = [cell[name] for cell in own]
            row[name] = worst(figures) if figures and None not in figures else None
        row |= {name: finite(attention.get(layer, {}).get(name)) for name in ATTENTION}
        row["latency_share"] = times[layer] / sum(times) if times else None
        rows.append(row)
    return rows


def saturation(errors: pl.DataFrame | None) -> tuple[float | None, str]:
    """The largest share of saturated elements of any layer's keys or values, and where that is."""
    if errors is None or errors.is_empty():
        return None, ""
    shares = errors.group_by("layer", "tensor", maintain_order=True).agg(by_tokens("saturated"))
    worst = shares.sort("saturated", "layer", "tensor", descending=[True, False, False]).row(0, named=True)
    return finite(worst["saturated"]), f"{worst['tensor']}s of layer {worst['layer']}"


def by_tokens(name: str) -> pl.Expr:
    """The mean of a column over the tokens that its rows stand for; NaN, which sorts last, if any row lacks it."""
    return (pl.col(name).fill_null(math.nan) * pl.col("tokens")).sum() / pl.col("tokens").sum()


def outcomes(generations: pl.DataFrame | None, cohort: str) -> pl.DataFrame | None:
    """The greedy generations of a cohort; None where there are none, or where one was not graded."""
    if generations is None:
        return None
    rows = generations.filter(pl.col("mode") == GREEDY, pl.col("cohort") == cohort)
    ungraded = any(rows[name].has_nulls() for name in ("correct", "correct_reference"))
    return None if rows.is_empty() or ungraded else rows


def cohort_drift(generations: pl.DataFrame | None, cohort: str, limit: float, confidence: float) -> Drift | None:
    """The pass rule on what the reference gets right and the candidate does not."""
    rows = outcomes(generations, cohort)
    if rows is None:
        return None
    right = rows.filter("correct_reference")
    return drift(right.filter(~pl.col("correct")).height, right.height, limit, confidence)


def cohort_table(evidence: Evidence, critical: list[str], limit: float, confidence: float) -> list[dict[str, Any]]:
    """A row a cohort, critical ones first: how its logits and its behaviour compare with the reference's."""
    logits, generations = evidence.logits, evidence.generations
    known = set(critical)
    for frame in (logits, generations):
        known |= set() if frame is None else set(frame["cohort"].unique())
    table = []
    for cohort in sorted(known, key=lambda name: (name not in critical, name)):
        scored = None if logits is None else logits.filter(cohort=cohort)
        figures = logits_summary(scored)
        row = {"cohort": cohort, "critical": cohort in critical}
        row |= {name: figures[name] for name in ("tokens", "kl", "kl_low", "kl_high", "kl_max", "same_top1")}
        found = cohort_drift(generations, cohort, limit, confidence)
        row |= {"right": None, "drifted": None, "bound": None, "status": None, "needed": None}
        if found is not None:
            row |= {"right": found.items, "drifted": found.drifted, "bound": found.bound}
            row |= {"status": found.status, "needed": found.needed}
        table.append(row | _behaviour(outcomes(generations, cohort)))
    return table


def _behaviour(rows: pl.DataFrame | None) -> dict[str, Any]:
    """Counts of what else changed, and McNemar's p-value of right against wrong."""
    if rows is None:
        return dict.fromkeys(("items", "gained", "p_value", "changed", "format_broken", "refusal_changed"))
    lost = rows.filter(pl.col("correct_reference") & ~pl.col("correct")).height
    gained = rows.filter(~pl.col("correct_reference") & pl.col("correct")).height
    return {
        "items": rows.height,
        "gained": gained,
        "p_value": mcnemar(lost, gained),
        "changed": rows["first_divergence"].count(),
        "format_broken": rows.filter(pl.col("valid_format_reference") & ~pl.col("valid_format")).height,
        "refusal_changed": rows.filter(pl.col("refused_reference") != pl.col("refused")).height,
    }


def recall_grid(generations: pl.DataFrame | None, cohort: str) -> list[dict[str, Any]]:
    """A row a (length, depth) of the needle grid: items, and how many the reference and the candidate recall."""
    rows = outcomes(generations, cohort)
    if rows is None:
        return []
    counted = {
        "items": pl.len(),
        "reference": pl.col("correct_reference").sum(),
        "candidate": pl.col("correct").sum(),
        "kept": (pl.col("correct_reference") & pl.col("correct")).sum(),
    }
    grid = rows.group_by("length", "depth", maintain_order=True).agg(
        count.cast(pl.Int64).alias(name) for name, count in counted.items()
    )
    return grid.sort("length", "depth").to_dicts()
