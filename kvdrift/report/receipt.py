"""The receipt of a release as plain data: the decision, what it rests on, and what it does not cover.

`sections.py` lays it out for reading. Whatever was not measured is None here and fails its gate.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from kvdrift.ledger import CacheShape, account, bits_per_element
from kvdrift.policy import CachePolicy, Quantizer
from kvdrift.report.export import engine_flags
from kvdrift.report.frontier import BreakEven, Choice, activation
from kvdrift.report.origin import Hash, revision

REFERENCE = "`sdpa`, as Transformers calls it (torch's scaled_dot_product_attention), over its DynamicCache"
"""What attends on the reference path, and on a layer that packs nothing."""


@dataclass(frozen=True)
class Run:
    """What the stages left behind, by policy where it is a mapping; None is not measured."""

    verdicts: Sequence[Mapping[str, Any]]
    evens: Mapping[str, BreakEven]
    packings: Mapping[str, Mapping[str, Any] | None]
    latencies: Mapping[str, Mapping[str, Any] | None]
    drills: Mapping[str, Mapping[str, Any] | None]
    manifest: Mapping[str, Any]
    device: Mapping[str, Any] | None
    software: Mapping[str, Any] | None
    calibration: Mapping[str, Any] | None
    changes: Sequence[Mapping[str, Any]]
    floor: Mapping[str, Any] | None
    """The reference against itself in another batch: what KL and agreement amount to noise."""
    probes: Sequence[Mapping[str, Any]]
    """What the probe quantizers do to single cells; empty if not measured."""
    config: Mapping[str, Any]
    """What was selected from conf/, as composed."""
    commit: Mapping[str, Any] | None
    """Of the code, {commit, dirty}; None outside a git checkout."""
    hashes: Sequence[Hash]
    figures: Sequence[str]
    """Files beside the receipt."""


def receipt(run: Run, choice: Choice, released: CachePolicy) -> dict[str, Any]:
    """Everything that a release may point to, with the gates of the policy that ships and the fate of every other."""
    shape = CacheShape(**run.manifest["shape"])
    verdict = next((verdict for verdict in run.verdicts if verdict["policy"] == choice.policy), None)
    packing, latency = run.packings.get(choice.policy) or {}, run.latencies.get(choice.policy)
    limits = (verdict or run.verdicts[0])["limits"]
    even = run.evens.get(choice.policy) or BreakEven(None, None)
    decision = asdict(choice) | {"model": run.manifest["source"]["id"], "activation": activation(released, even)}
    return {
        "decision": decision | {"break_even": asdict(even)},
        "workload": limits["workload"],
        "limits": limits,
        "gates": verdict["gates"] if verdict else [],
        "candidates": candidates(run, choice),
        "tensors": {
            "shape": run.manifest["shape"],
            "dtype": run.manifest["dtype"],
            "architecture": run.manifest.get("architecture"),
            "positions": run.manifest.get("positions"),
            "rope": run.manifest.get("rope"),
            "layer_types": run.manifest.get("layer_types"),
        },
        "policy": _policy(released, shape),
        "calibration": (run.calibration or {}).get("coverage"),
        "device": run.device,
        "software": run.software,
        "memory": _memory(released, shape, packing, limits["workload"], even),
        "escalated_blocks": packing.get("escalated_blocks"),
        "latency": latency,
        "attention": _attention(run),
        "figures": list(run.figures),
        "worst_cells": {verdict["policy"]: worst_cells(verdict) for verdict in run.verdicts},
        "interaction": {verdict["policy"]: verdict["interaction"] for verdict in run.verdicts},
        "slices": verdict["slices"] if verdict else [],
        "logits_by_position": verdict["logits_by_position"] if verdict else [],
        "steps": {verdict["policy"]: verdict["steps"] for verdict in run.verdicts},
        "noise_floor": run.floor,
        "layer_maps": {verdict["policy"]: verdict["layers"] for verdict in run.verdicts},
        "probes": list(run.probes),
        "logits": verdict["logits"] if verdict else None,
        "cohorts": verdict["cohorts"] if verdict else [],
        "cohorts_by_policy": {verdict["policy"]: verdict["cohorts"] for verdict in run.verdicts},
        "recall": verdict["recall"] if verdict else [],
        "changes": list(run.changes),
        "unsupported": _unsupported(run, released, verdict, latency),
        "fallback": _fallback(run, choice),
        "alarms": _alarms(limits, verdict, run, packing, released),
        "engines": [asdict(flag) for flag in engine_flags(released)],
        "origin": {"model": dict(run.manifest["source"]) | {"revision_is": revision(run.manifest["source"])}}
        | {"commit": run.commit},
        "config": dict(run.config),
        "hashes": [asdict(row) for row in run.hashes],
    }


def candidates(run: Run, choice: Choice) -> list[dict[str, Any]]:
    """The decision table, a row a policy: its numbers, both break-evens, and the gates that it did not pass."""
    return [
        {
            "policy": verdict["policy"],
            "decision": verdict["decision"],
            "chosen": verdict["policy"] == choice.policy,
            "metrics": verdict["metrics"],
            "break_even": asdict(run.evens[verdict["policy"]]),
            "failed": [gate for gate in verdict["gates"] if not gate["passed"]],
        }
        for verdict in run.verdicts
    ]


def worst_cells(verdict: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The cells that use up most of their limits, after the two that the gates name: {gate, layer, bucket, …}."""
    cells = [cell for cell in verdict["cells"] if cell["cos"] is not None and cell["kl"] is not None]
    if not cells:
        return [{"gate": None} | cell for cell in verdict["worst_cells"]]
    found: list[dict[str, Any]] = []
    named = {"cell kl": max(cells, key=lambda cell: cell["kl"]), "cell cos": min(cells, key=lambda cell: cell["cos"])}
    for cell in (*named.values(), *verdict["worst_cells"]):
        if not any((row["layer"], row["bucket"]) == (cell["layer"], cell["bucket"]) for row in found):
            gates = [name for name, worst in named.items() if worst is cell]
            found.append({"gate": ", ".join(gates) or None} | cell)
    return found


def describe(quantizer: Quantizer | None) -> str:
    """A quantizer in words: format, bits, direction, group and what it stores beside the codes."""
    if quantizer is None:
        return "exact"
    groups = f"groups of {quantizer.group} {'tokens' if quantizer.axis == 'channel' else 'channels'}"
    groups = groups if quantizer.group else "one group a head"
    stored = f"{quantizer.scale_dtype} scale{' and low' if quantizer.has_low else ''}"
    return f"{quantizer.format} {quantizer.bits}-bit per {quantizer.axis}, {groups}, {stored}"


def _policy(policy: CachePolicy, shape: CacheShape) -> dict[str, Any]:
    """The policy's own fields, the bits of every layer, and runs of layers that share their quantizers."""
    full = policy.bind(shape.layers, shape.head_dim)
    runs: list[dict[str, Any]] = []
    for index, layer in enumerate(full.layers):
        key, value = describe(layer.key), describe(layer.value)
        if runs and (runs[-1]["key"], runs[-1]["value"]) == (key, value):
            runs[-1]["last"] = index
        else:
            runs.append({"first": index, "last": index, "key": key, "value": value})
    fields = ("name", "sink_tokens", "residual_window", "block", "rollback", "prefill", "escalation")
    own = {name: getattr(full, name) for name in (*fields, "min_length", "max_length")}
    return own | {
        "id": full.id,
        "bits_per_element": bits_per_element(full, shape),
        "key_bits": [8 * shape.dtype_bytes if layer.key is None else layer.key.bits for layer in full.layers],
        "value_bits": [8 * shape.dtype_bytes if layer.value is None else layer.value.bits for layer in full.layers],
        "quantizers": runs,
        "clipping": "none: each group's scale spans its whole range",
    }


def _memory(
    policy: CachePolicy, shape: CacheShape, packing: Mapping[str, Any], workload: Mapping[str, int], even: BreakEven
) -> list[dict[str, Any]]:
    """Reference, ideal, format and held bytes with packing on: at each length that was reconciled, at the workload
    and from where it is smaller. `held` is None where it was not measured."""
    held = {(row["tokens"], row.get("batch", 1)): row["held_bytes"] for row in packing.get("memory") or []}
    target = workload["context"] + workload["output"], workload["batch"]
    smaller = {(even.smaller, 1)} if even.smaller is not None and even.smaller > 0 else set()
    rows = []
    for tokens, batch in sorted({*held, target, *smaller}):
        ledger = account(replace(policy, min_length=0, max_length=None), shape, tokens, batch)
        row = {"tokens": tokens, "batch": batch, "reference": ledger.reference, "ideal": ledger.ideal}
        row |= {"format": ledger.format_bytes, "held": held.get((tokens, batch)), "target": (tokens, batch) == target}
        rows.append(row | {"smaller": (tokens, batch) in smaller})
    return rows


def _attention(run: Run) -> dict[str, Any]:
    """What ran as attention on both paths, and for each packing policy its bits, its decode step over the reference's
    and, where they were timed, the milliseconds of a step that attention takes."""
    exact = next((verdict for verdict in run.verdicts if verdict["exact"]), None)

    def timed(policy: str) -> float | None:
        layers = (run.latencies.get(policy) or {}).get("attention_ms")
        return sum(layers) if layers else None

    return {
        "reference": REFERENCE,
        "candidate": f"{(run.device or {}).get('backend') or 'unknown'} kernel over packed pages",
        "exact_itl": exact and exact["metrics"]["itl"],
        "exact_ms": exact and timed(exact["policy"]),
        "policies": [
            {"policy": verdict["policy"], "bits": verdict["metrics"]["bits"], "itl": verdict["metrics"]["itl"]}
            | {"attention_ms": timed(verdict["policy"])}
            for verdict in run.verdicts
            if not verdict["exact"]
        ],
    }


def _unsupported(
    run: Run, policy: CachePolicy, verdict: Mapping[str, Any] | None, latency: Mapping[str, Any] | None
) -> list[str]:
    """What this receipt does not cover, in words."""
    device = run.device or {}
    found = [f"{name}: stays exact" for name in run.manifest.get("unsupported") or []]
    if policy.max_length is not None:
        found.append(f"sequences longer than {policy.max_length:,} tokens, the longest evaluated: routed to exact")
        if policy.rollback and 0 < policy.min_length <= policy.max_length:
            both = f"{policy.min_length:,} to {policy.min_length + policy.rollback - 1:,} tokens"
            found.append(f"fewer bytes from {both}: until a rollback can't undo packing, exact copies are held besides")
    where = device.get("gpu") or device.get("cpu") or "the machine it was measured on"
    found.append(f"other devices than {where} with the {device.get('backend', 'unknown')} kernels: measure again")
    if verdict is not None:
        silent = [row["cohort"] for row in verdict["cohorts"] if row["status"] == "inconclusive"]
        if silent:
            found.append(f"cohorts too small to conclude on drift: {', '.join(silent)}")
        failed = [row["cohort"] for row in verdict["cohorts"] if row["status"] == "fail"]
        if failed:
            found.append(f"cohorts with more drift than the limit, critical or not: {', '.join(failed)}")
    found += [f"not available in the latency measurement: {name}" for name in (latency or {}).get("unavailable") or []]
    return found


def _fallback(run: Run, choice: Choice) -> dict[str, Any]:
    """The proof that the reference path comes back: the drill's checks, and the gates of the exact policy."""
    exact = next((verdict for verdict in run.verdicts if verdict["exact"]), None)
    drill = run.drills.get(choice.policy) or {}
    return {"checks": drill.get("checks") or [], "exact": exact["gates"] if exact else []}


def _alarms(
    limits: Mapping[str, Any],
    verdict: Mapping[str, Any] | None,
    run: Run,
    packing: Mapping[str, Any],
    policy: CachePolicy,
) -> list[dict[str, Any]]:
    """What to watch once it serves, with the figure of this evaluation, None where it has none, beside the figure that
    ends the rollout."""
    logits = verdict["logits"] if verdict else {}
    gates = {gate["name"]: gate["measured"] for gate in verdict["gates"]} if verdict else {}
    exact = next((verdict for verdict in run.verdicts if verdict["exact"]), None)
    fallback = {gate["name"]: gate["measured"] for gate in exact["gates"]} if exact else {}
    escalated = packing.get("escalated_blocks")
    rows = [
        ("mean KL of mirrored requests, nats", logits.get("kl"), limits["max_kl"]),
        ("99th percentile of KL, nats", logits.get("kl_p99"), limits["max_kl_p99"]),
        ("upper bound of the drift rate in a critical cohort", _worst_drift(gates), limits["max_drift"]),
        ("saturated share of a layer", gates.get("saturated"), limits["max_saturated"]),
        ("p95 of a decode step over the reference's", gates.get("p95 ratio"), limits["max_p95_ratio"]),
        ("blocks that had to stay exact, over as many requests as prompts were evaluated", escalated, escalated),
        ("blocks refused for their header or checksum", None, 0),
        ("packed sequences beyond the certified length", None, 0),
        ("generations of the exact fallback that differ from the reference", fallback.get("changed generations"), 0),
    ]
    kept = rows[-1:] if policy.is_exact else rows
    return [{"signal": signal, "measured": measured, "alarm_above": limit} for signal, measured, limit in kept]


def _worst_drift(gates: Mapping[str, float | None]) -> float | None:
    return max((bound for name, bound in gates.items() if name.startswith("drift") and bound is not None), default=None)
