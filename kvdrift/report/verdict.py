"""The verdict on one policy: every limit beside its figure, and one decision.

A candidate is accepted only if each of its gates passes. The exact policy is no candidate: it saves nothing and its
decision is `fallback`, given that it restores the reference path to the bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from kvdrift.ledger import Ledger, bits_per_element
from kvdrift.report import evidence as read
from kvdrift.report.artifacts import sound
from kvdrift.report.evidence import Evidence
from kvdrift.report.gates import NOT_MEASURED, Gate, at_least, at_most, cell_gates, cell_name, used
from kvdrift.report.limits import CellLimits, Limits
from kvdrift.report.slices import logits_rows, slice_rows, step_rows
from kvdrift.serving.checks import REQUIRED

NEVER = -1
"""`even` of a policy that is slower at every length; 0 is faster at every length."""

WORST = 5


def judge(evidence: Evidence, limits: Limits) -> dict[str, Any]:
    """The verdict as plain data: decision, gates, cells, cohorts, recall grid, and the numbers of `metrics`."""
    evidence = sound(evidence)
    exact = evidence.policy.is_exact
    cells = read.cell_table(evidence)
    cohorts = read.cohort_table(evidence, limits.critical, limits.max_drift, limits.confidence)
    summary = read.logits_summary(evidence.logits)
    grid = read.recall_grid(evidence.generations, limits.grid)
    ledger = read.at_workload(evidence, limits.workload.tokens, limits.workload.batch)
    gates = [_sound(evidence)]
    if exact:
        gates += _fallback(evidence, summary)
    else:
        gates += [
            *_savings(evidence, ledger, limits),
            _latency(evidence, limits),
            *_cells(cells, limits.cell),
            *_logits(summary, cohorts, limits),
            *_drift(cohorts, limits),
            _recall(grid, limits),
            at_most("saturated", *_saturated(evidence, limits)),
            _drill(evidence),
        ]
    passed = all(gate.passed for gate in gates)
    ranked = sorted(cells, key=lambda cell: -used(cell, limits.cell))
    return {
        "policy": evidence.policy.name,
        "policy_id": evidence.policy.id,
        "exact": exact,
        "decision": ("fallback" if exact else "accept") if passed else "reject",
        "gates": [gate.to_dict() for gate in gates],
        "limits": asdict(limits),
        "worst_cell": ranked[0] if ranked else None,
        "worst_cells": ranked[:WORST],
        "interaction": read.interaction(evidence),
        "slices": slice_rows(evidence.errors, evidence.attention),
        "steps": step_rows(evidence.generations),
        "logits_by_position": logits_rows(evidence.logits),
        "cells": cells,
        "layers": read.layer_map(evidence, cells, limits.workload.tokens, limits.workload.batch),
        "cohorts": cohorts,
        "logits": summary,
        "recall": grid,
        "bytes": ledger.to_dict(),
        "metrics": _metrics(evidence, passed, ledger, summary, cells, cohorts, grid, limits),
    }


def _sound(evidence: Evidence) -> Gate:
    """Artifacts that can't be used, none of which is allowed, and why."""
    faults = [f"{name}: {fault}" for name, fault in evidence.faults.items()]
    return at_most("evidence", len(faults), 0.0, "; ".join(faults))


def _savings(evidence: Evidence, ledger: Ledger, limits: Limits) -> list[Gate]:
    """Savings that exist: in the format, to the byte in the storages, and in the peak that was allocated."""
    paper = f"ideal codes alone are {ledger.ideal / ledger.reference:.3g}"
    packing, headline = evidence.packing or {}, (evidence.latency or {}).get("headline") or {}
    rows = packing.get("memory") or []
    off = [row for row in rows if not _reconciled(row, evidence)]
    detail = "; ".join(
        f"{row['tokens']} tokens: {row['held_bytes']} bytes held, {row['format_bytes']} in the format"
        for row in off[:3]
    )
    if rows and not off and packing["reconciled"] is not True:
        off, detail = rows, "the lengths as a whole are not"
    peak = _over(headline.get("peak_bytes"), headline.get("reference_peak_bytes"))
    return [
        at_most("bytes ratio", ledger.to_dict()["ratio"], limits.max_bytes_ratio, paper),
        at_least("reconciled", 1 - len(off) / len(rows) if rows else None, 1.0, detail),
        at_most("peak ratio", peak, limits.max_peak_ratio),
    ]


def _reconciled(row: dict[str, Any], evidence: Evidence) -> bool:
    """Whether a row's bytes are the ledger's own at that length, and were held but for the blocks that stay exact."""
    expected = read.at_workload(evidence, row["tokens"], 1).format_bytes
    escalated = row["escalated_blocks"] * evidence.policy.block * evidence.shape.token_bytes
    return row["reconciled"] and row["format_bytes"] == expected and row["held_bytes"] == expected + escalated


def _over(after: Any, before: Any) -> float | None:
    return after / before if after is not None and before else None


def _latency(evidence: Evidence, limits: Limits) -> Gate:
    """The p95 of a decode step, if it was measured on the workload that the gates declare."""
    latency = evidence.latency or {}
    target, found = asdict(limits.workload), latency.get("workload")
    if latency and found != target:
        return at_most("p95 ratio", None, limits.max_p95_ratio, f"measured on {found}, the target workload is {target}")
    headline = latency.get("headline") or {}
    before, after = headline.get("p95_reference_ms"), headline.get("p95_ms")
    detail = f"{before:.3g} ms to {after:.3g} ms" if headline else ""
    low, high = headline.get("p95_ratio_low"), headline.get("p95_ratio_high")
    detail += f", 95 % interval of the ratio {low:.3g} to {high:.3g}" if low is not None and high is not None else ""
    return at_most("p95 ratio", _over(after, before), limits.max_p95_ratio, detail)


def _cells(cells: Sequence[dict[str, Any]], limits: CellLimits) -> list[Gate]:
    """The worst cosine and the worst KL of all cells."""
    if not cells:
        absent = "no cell was measured"
        return [at_least("cell cos", None, limits.cos, absent), at_most("cell kl", None, limits.kl, absent)]
    cos, kl = zip(*(cell_gates(cell, limits) for cell in cells), strict=True)
    return [_worst("cell cos", cos, cells), _worst("cell kl", kl, cells)]


def _worst(name: str, gates: Sequence[Gate], cells: Sequence[dict[str, Any]]) -> Gate:
    """The gate of the cell that misses its figure, or else is nearest to its limit or furthest beyond; cell named."""
    missing = [index for index, gate in enumerate(gates) if gate.measured is None]
    if missing:
        index, more = missing[0], f" and {len(missing) - 1} more cells" if len(missing) > 1 else ""
        return replace(gates[index], name=name, detail=f"{NOT_MEASURED} in {cell_name(cells[index])}{more}")
    sign = 1 if gates[0].sense == "at least" else -1
    index = min(range(len(gates)), key=lambda i: sign * (gates[i].measured or 0.0))
    shown = f", on prompt {cells[index]['prompt']}" if gates[0].sense == "at most" else ""
    return replace(gates[index], name=name, detail=f"worst in {cell_name(cells[index])}{shown}")


def _logits(summary: dict[str, Any], cohorts: Sequence[dict[str, Any]], limits: Limits) -> list[Gate]:
    """Mean and tail of KL, the same top token, and the mean of the worst cohort, which an aggregate would hide."""
    known = [row for row in cohorts if row["tokens"]]
    blind = next((row["cohort"] for row in known if row["kl"] is None), None)
    worst = None if blind or not known else max(known, key=lambda row: row["kl"])
    where = f"worst in {worst['cohort']}" if worst else f"{NOT_MEASURED} in {blind}" if blind else ""
    cohort = at_most("cohort kl", worst and worst["kl"], limits.max_cohort_kl, where)
    tail = "" if summary["kl_p99"] is not None else f"{summary['tokens'] or 0} scored tokens carry no p99"
    return [
        at_most("kl", summary["kl"], limits.max_kl),
        at_most("kl p99", summary["kl_p99"], limits.max_kl_p99, tail),
        cohort,
        at_least("same top-1", summary["same_top1"], limits.min_same_top1),
    ]


def _drift(cohorts: Sequence[dict[str, Any]], limits: Limits) -> list[Gate]:
    """The pass rule of each critical cohort: the bound on its drift rate."""
    gates = []
    for row in cohorts:
        if not row["critical"]:
            continue
        name = f"drift in {row['cohort']}"
        if row["status"] is None:
            gates.append(at_most(name, None, limits.max_drift))
            continue
        detail = f"{row['drifted']} of {row['right']} that the reference gets right"
        if row["status"] == "inconclusive":
            detail += f"; needs {row['needed']} more without a drift"
        gates.append(Gate(name, row["status"], row["bound"], "at most", limits.max_drift, detail))
    return gates or [at_most("drift", None, limits.max_drift, "the gates name no critical cohort")]


def _recall(grid: Sequence[dict[str, Any]], limits: Limits) -> Gate:
    """The share of needles kept at the worst length; inconclusive where the reference recalls none."""
    name, kept = "needle recall", {}
    for length in sorted({row["length"] for row in grid}):
        rows = [row for row in grid if row["length"] == length]
        right = sum(row["reference"] for row in rows)
        kept[length] = sum(row["kept"] for row in rows) / right if right else None
    known = {length: share for length, share in kept.items() if share is not None}
    if not known:
        detail = "the reference recalls no needle" if grid else NOT_MEASURED
        return Gate(name, "inconclusive" if grid else "fail", None, "at least", limits.min_recall, detail)
    worst = min(known, key=lambda length: (known[length], -length))
    lost = [f"{row['length']:,} × {row['depth']:g}" for row in grid if row["kept"] < row["reference"]]
    gate = at_least(name, known[worst], limits.min_recall, f"lost at length × depth {', '.join(lost)}" if lost else "")
    blind = [f"{length:,}" for length in kept if length not in known]
    if gate.passed and blind:
        detail = f"the reference recalls no needle at {', '.join(blind)} tokens"
        return Gate(name, "inconclusive", gate.measured, "at least", limits.min_recall, detail)
    return gate


def _saturated(evidence: Evidence, limits: Limits) -> tuple[float | None, float, str]:
    share, where = read.saturation(evidence.errors)
    return (
        share,
        limits.max_saturated,
        f"worst in {where}" if share is not None else f"{NOT_MEASURED} in {where}" if where else "",
    )


def _drill(evidence: Evidence) -> Gate:
    """The share of the drill's checks that ran and passed, all of which have to."""
    if evidence.drill is None:
        return at_least("drill", None, 1.0)
    checks = evidence.drill["checks"]
    names = [check["name"] for check in checks]
    if odd := sorted(name for name in names if names.count(name) > 1 or name not in REQUIRED):
        return at_least("drill", 0.0, 1.0, f"no check of the drill, or twice: {', '.join(odd)}")
    failing = [check["name"] for check in checks if not check["passed"]] + [x for x in REQUIRED if x not in names]
    if not failing and not evidence.drill["passed"]:
        return at_least("drill", 0.0, 1.0, "the drill as a whole did not pass")
    share = 1 - len(failing) / len(REQUIRED)
    return at_least("drill", share, 1.0, f"failing or not run: {', '.join(failing)}" if failing else "")


def _fallback(evidence: Evidence, summary: dict[str, Any]) -> list[Gate]:
    """What the exact policy has to show: the reference path itself, token for token."""
    rows = evidence.generations
    changed = rows["first_divergence"].count() if rows is not None and rows.height else None
    ratio = Gate("bytes ratio", "not applicable", 1.0, "at most", 1.0, "exact tokens save nothing")
    return [
        ratio,
        at_most("kl max", summary["kl_max"], 0.0, f"on {summary['tokens'] or 0} scored tokens"),
        at_least("same top-1", summary["same_top1"], 1.0),
        at_most("changed generations", changed, 0.0, f"of {0 if rows is None else rows.height}"),
        _drill(evidence),
    ]


def _metrics(
    evidence: Evidence,
    passed: bool,
    ledger: Ledger,
    summary: dict[str, Any],
    cells: Sequence[dict[str, Any]],
    cohorts: Sequence[dict[str, Any]],
    grid: Sequence[dict[str, Any]],
    limits: Limits,
) -> dict[str, float | int | None]:
    """The numbers of `metrics/<policy>.json`, in six digits; None is not measured."""
    cosines = [cell["cos"] for cell in cells]
    drifted = [row["drifted"] for row in cohorts if row["critical"]]
    right = sum(row["reference"] for row in grid)
    headline = (evidence.latency or {}).get("headline") or {}
    even = break_even((evidence.latency or {}).get("break_even"), limits.workload.batch)
    if evidence.policy.is_exact:
        even = None  # two fits of one path cross wherever noise has it
    found = {
        "accepted": int(passed),
        "bits": bits_per_element(evidence.policy, evidence.shape),
        "bytes": ledger.to_dict()["ratio"],
        "kl": summary["kl"],
        "kl_p99": summary["kl_p99"],
        "top1": summary["same_top1"],
        "min_cos": 1.0 if evidence.policy.is_exact else None if not cosines or None in cosines else min(cosines),
        "drift": None if not drifted or None in drifted else sum(drifted),
        "recall": sum(row["kept"] for row in grid) / right if right else None,
        "itl": headline.get("itl_ratio"),
        "even": even,
    }
    return {name: float(f"{value:.6g}") if isinstance(value, float) else value for name, value in found.items()}


def break_even(found: dict[str, Any] | None, batch: int) -> int | None:
    """The length in tokens from which packing is faster at this batch; 0 at any, NEVER at none, None if unknown."""
    row = (found or {}).get(str(batch)) or {}
    return {"always": 0, "never": NEVER}.get(row.get("verdict", ""), row.get("tokens"))
