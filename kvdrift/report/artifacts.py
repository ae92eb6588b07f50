"""What each stage's artifact must look like before a gate may read it, given the policy, the model and the prompts.

An artifact that is missing, damaged, incomplete, of another policy or that tells impossible figures is taken for not
measured, and says why. So whatever is wrong with one fails every gate that needs it, by name.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import polars as pl

from kvdrift.ledger import account, bits_per_element
from kvdrift.policy import packed_until
from kvdrift.prompts.batches import modes_of
from kvdrift.prompts.prompt import GENERATED, REGIONS
from kvdrift.report.evidence import Evidence
from kvdrift.report.shapes import (
    ATTENTION,
    CELLS,
    DRILL,
    ERRORS,
    GENERATIONS,
    LATENCY,
    LOGITS,
    NOISE,
    PACKING,
)
from kvdrift.report.slices import FIGURES, SLICES
from kvdrift.report.strict import value_fault
from kvdrift.report.tables import rows_fault, table_fault


def sound(evidence: Evidence) -> Evidence:
    """`evidence` without what is not as it must be; `faults` holds, for each of these, what is wrong with it."""
    faults = dict(evidence.faults)
    for name, check in CHECKS.items():
        found = getattr(evidence, name)
        try:
            fault = "not measured" if found is None else check(found, evidence)
        except (Exception, pl.exceptions.PanicException) as error:  # unforeseen, so a fault too
            fault = f"{type(error).__name__}: {' '.join(str(error).split())}"
        if fault:
            faults.setdefault(name, fault)
    nothing: dict[str, Any] = dict.fromkeys(faults)
    return replace(evidence, faults=faults, **nothing)


def _packing(found: Any, evidence: Evidence) -> str | None:
    fault = value_fault(found, PACKING, "packing") or _owner(found, evidence)
    if fault:
        return fault
    bits = bits_per_element(evidence.policy, evidence.shape)
    if not math.isclose(found["bits_per_element"], bits, rel_tol=NOISE):
        return f"bits_per_element is {found['bits_per_element']}; the policy's are {bits:g}"
    lengths, expected = (sorted(x) for x in ([row["tokens"] for row in found["memory"]], _own(evidence)["length"]))
    expected = sorted(set(expected))
    return None if lengths == expected else f"memory is of {lengths} tokens; the prompts have {expected}"


def _latency(found: Any, evidence: Evidence) -> str | None:
    fault = value_fault(found, LATENCY, "latency") or _owner(found, evidence)
    if fault:
        return fault
    rows, headline, workload = found["rows"], found["headline"], found["workload"]
    measured = [(r["batch"], r["context"], r["generated"], r["phase"], r["reuse"]) for r in rows]
    if len(set(measured)) < len(measured):
        return "a setting of latency.rows comes twice"
    if measured[0][:2] + measured[0][3:] != (workload["batch"], workload["context"], "decode", "fresh"):
        return f"latency.rows[0] is {measured[0]}; allowed: the workload, {workload}"
    names = {"itl_ratio": "ratio", "p95_ratio": "p95_ratio", "p95_ms": "candidate_p95_ms"}
    for name, source in (names | {"p95_reference_ms": "reference_p95_ms"}).items():
        if headline[name] != rows[0][source]:
            return f"headline.{name} is {headline[name]}; the workload's row says {rows[0][source]}"
    for row in rows:
        before, after, ratio = row["reference_p95_ms"], row["candidate_p95_ms"], row["p95_ratio"]
        if None not in (before, after, ratio) and not math.isclose(ratio, after / before, rel_tol=NOISE):
            return f"p95_ratio is {ratio}; {after} ms over {before} ms is {after / before:g}"
    ledger = account(evidence.policy, evidence.shape, workload["context"], workload["batch"])
    for side, least in (("", ledger.format_bytes), ("reference_", ledger.reference)):
        held, peak = headline[f"{side}held_bytes"], headline[f"{side}peak_bytes"]
        if not least <= held <= peak:
            return f"headline: {side}peak_bytes is {peak}, {side}held_bytes {held}; the cache alone takes {least}"
    if len(found["attention_ms"]) != len(evidence.policy.layers):
        return f"attention_ms is of {len(found['attention_ms'])} layers; the model has {len(evidence.policy.layers)}"
    for batch, even in found["break_even"].items():
        verdict, tokens = even["verdict"], even["tokens"]
        agrees = {"always": tokens == 0, "never": tokens is None, "crosses": _crosses(even)}[verdict]
        if not (batch.isdecimal() and agrees):
            return f"break_even of batch {batch} is {verdict!r} at {tokens} tokens, not as its lines say"
    return None


def _crosses(even: dict[str, Any]) -> bool:
    """Whether the candidate's line goes below the reference's from just these tokens on."""
    intercept, slope = (even["candidate"][name] - even["reference"][name] for name in ("intercept", "slope"))
    return slope < 0 and even["tokens"] == math.ceil(-intercept / slope) > 0


def _drill(found: Any, evidence: Evidence) -> str | None:
    return value_fault(found, DRILL, "drill") or _owner(found, evidence)


def _owner(found: Any, evidence: Evidence) -> str | None:
    """An artifact of another policy."""
    wanted = evidence.policy.id
    return None if found["policy"] == wanted else f"it is of policy {found['policy']}, not of {wanted}"


def _errors(found: pl.DataFrame, evidence: Evidence) -> str | None:
    """Every packed token of the first prompt of each cohort and length, in each packed layer: of the prompt itself, and
    of what was fed behind it."""
    fault = table_fault(found, ERRORS, ("prompt", "layer", "tensor", "bucket", "role"))
    if fault:
        return fault
    packed, parts = _packed(evidence, _firsts(evidence), "held"), ["prompt", "cohort", "length", "layer"]
    edge = pl.col("length").clip(pl.col("first"), pl.col("stop"))
    regions = {False: edge - pl.col("first"), True: pl.col("stop") - edge}
    expected = pl.concat(
        packed.select(*parts, tensor=pl.lit(tensor), generated=pl.lit(generated), tokens=tokens)
        for tensor in ("key", "value")
        for generated, tokens in regions.items()
    ).filter(pl.col("tokens") > 0)
    sums = found.group_by(*parts, "tensor", generated=pl.col("role") == GENERATED).agg(pl.col("tokens").sum())
    return rows_fault(sums, expected)


def _attention(found: pl.DataFrame, evidence: Evidence) -> str | None:
    """One row a layer and prompt over all that is packed, wherever queries were stored."""
    fault = table_fault(found, ATTENTION, ("prompt", "layer", "slice", "bucket", "role"))
    replayed = _firsts(evidence).filter(pl.col("scored") > 1)
    expected = _packed(evidence, replayed, "held").select("prompt", "cohort", "layer")
    fault = fault or rows_fault(found.filter(slice="layer"), expected)
    if fault:
        return fault
    wanted, regions = pl.Series(sorted(["layer", *SLICES])), pl.Series(sorted(REGIONS))
    region = pl.col("role").filter(slice="region").sort()
    for where, row in found.group_by("prompt", "layer", maintain_order=True):
        kinds, roles = row["slice"].unique().sort(), row.select(region)["role"]
        if not (kinds.equals(wanted) and roles.equals(regions)):
            return f"prompt {where[0]}, layer {where[1]} has the slices {', '.join(kinds)}; all of a layer are needed"
    empty = found.filter(pl.col("slice") == "layer", pl.any_horizontal(pl.col(*FIGURES, "top_overlap").is_null()))
    return None if empty.is_empty() else f"{empty.height:,} layers have no figures, the first of {empty['prompt'][0]}"


def _logits(found: pl.DataFrame, evidence: Evidence) -> str | None:
    """Every scored token of every prompt."""
    fault = table_fault(found, LOGITS, ("prompt", "step"))
    scored = evidence.prompts.filter(pl.col("scored") > 1)
    expected = scored.select("prompt", "cohort", "length", step=pl.int_ranges(0, pl.col("scored") - 1)).explode("step")
    expected = expected.select("prompt", "cohort", "step", position=pl.col("length") + pl.col("step"))
    return fault or rows_fault(found, expected)


def _cells(found: pl.DataFrame, evidence: Evidence) -> str | None:
    """The cells of a layer and probe prompt hold each packed token once."""
    fault = table_fault(found, CELLS, ("prompt", "layer", "bucket", "tensor"))
    if fault:
        return fault
    probes = evidence.prompts.join(found.select("prompt").unique(), on="prompt", how="semi")
    if probes.is_empty():
        return "no prompt was probed"
    packed = found.filter(pl.any_horizontal(pl.col("kl", "start", "stop").is_not_null()))
    inside = pl.col("kl").is_not_null() & (pl.col("bucket") <= pl.col("start")) & (pl.col("tensor") == "both")
    if not packed.select(inside.all()).item():
        return "a cell has tokens and no KL, or the other way round, or starts before its bucket"
    spans = {"first": pl.col("start").min(), "stop": pl.col("stop").max()}
    spans["packed"] = (pl.col("stop") - pl.col("start")).sum()
    return rows_fault(
        packed.group_by("prompt", "layer").agg(**spans),
        _packed(evidence, probes).select("prompt", "layer", "first", "stop", "packed"),
    )


def _generations(found: pl.DataFrame, evidence: Evidence) -> str | None:
    """An answer to every task, sampled ones too where a batch samples, its figures agreeing with its text and score."""
    fault = table_fault(found, GENERATIONS, ("prompt", "mode"))
    if fault:
        return fault
    same = pl.col("tokens") == pl.col("tokens_reference")
    rules = {
        "first_divergence": pl.col("first_divergence").is_null() == same,
        "edit_distance": (pl.col("edit_distance") == 0) == same,
        "correct": pl.col("correct") == (pl.col("score") == 1),
        "correct_reference": pl.col("correct_reference") == (pl.col("score_reference") == 1),
    }
    for name, rule in rules.items():
        wrong = found.filter(~rule)
        if not wrong.is_empty():
            return f"{name} of {wrong['prompt'][0]} ({wrong['mode'][0]}) is not what its tokens and score say"
    batches = evidence.prompts.filter(pl.col("task") != "").group_by("batch", maintain_order=True)
    tasks = pl.concat(
        rows.with_columns(mode=pl.lit(mode)) for (batch,), rows in batches for mode in modes_of(batch, rows.height)
    )
    return rows_fault(found, tasks.select("prompt", "cohort", "task", "mode", "length", "depth", "answer"))


def _own(evidence: Evidence) -> pl.DataFrame:
    """The prompts of the corpus, without those that the attack found."""
    return evidence.prompts.filter(~pl.col("attack"))


def _firsts(evidence: Evidence) -> pl.DataFrame:
    """The first prompt of each cohort and length, batch by batch, whose tensors `quantize` compares: `held` tokens with
    its continuation's, of which the last scored one is never fed."""
    ordered = _own(evidence).sort("batch", maintain_order=True)
    ordered = ordered.with_columns(held=pl.col("length") + (pl.col("scored") - 1).clip(0))
    return ordered.unique(["cohort", "length"], keep="first", maintain_order=True)


def _packed(evidence: Evidence, prompts: pl.DataFrame, held: str = "length") -> pl.DataFrame:
    """Of these prompts, those that are packed at all once the cache holds so many tokens, a row a packed layer, with
    tokens [first, stop) packed."""
    policy = evidence.policy
    stops = {tokens: packed_until(policy, tokens) for tokens in prompts[held].unique()}
    layers = [index for index, layer in enumerate(policy.layers) if not layer.is_exact]
    spans = {
        "first": pl.lit(policy.sink_tokens, pl.Int64),
        "stop": pl.col(held).replace_strict(stops, return_dtype=pl.Int64),
    }
    rows = (
        prompts.with_columns(**spans).with_columns(packed=pl.col("stop") - pl.col("first")).filter(pl.col("packed") > 0)
    )
    return rows.join(pl.DataFrame({"layer": layers}, schema={"layer": pl.Int64}), how="cross")


CHECKS: dict[str, Callable[[Any, Evidence], str | None]] = {
    "packing": _packing,
    "errors": _errors,
    "attention": _attention,
    "logits": _logits,
    "cells": _cells,
    "generations": _generations,
    "latency": _latency,
    "drill": _drill,
}
"""Field of Evidence → what is wrong with it."""
