"""A receipt laid out for reading: a title that says the decision, then sections of text and tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvdrift.report.evidence import ATTENTION
from kvdrift.report.page import NOT_MEASURED, Block, Picture, Section, Table, blank, flat, shown, size


def title(receipt: Mapping[str, Any]) -> str:
    """The decision in one line."""
    decision = receipt["decision"]
    model = Path(decision["model"]).stem if decision["model"].endswith(".gguf") else decision["model"]
    if not decision["proven"]:
        return f"Decision: ship nothing on {model}"
    return (
        f"Decision: ship {decision['policy']} on {model}" if decision["packs"] else f"Decision: stay exact on {model}"
    )


def sections(receipt: Mapping[str, Any]) -> list[Section]:
    """Why first, then every candidate, then what the evidence rests on."""
    return [
        *_why(receipt),
        *_what(receipt),
        *_costs(receipt),
        *_where(receipt),
        *_behaviour(receipt),
        *_safety(receipt),
        *_provenance(receipt),
    ]


def _gates(gates: Sequence[Mapping[str, Any]]) -> Table:
    head = ("gate", "measured", "limit", "status", "detail")
    rows = [
        (
            gate["name"],
            shown(gate["measured"]),
            f"{gate['sense']} {shown(gate['limit'])}",
            "**" + gate["status"] + "**" if not gate["passed"] else gate["status"],
            gate["detail"],
        )
        for gate in gates
    ]
    return Table(head, rows)


def _why(receipt: Mapping[str, Any]) -> list[Section]:
    decision, workload = receipt["decision"], receipt["workload"]
    target = f"{workload['batch']} × ({workload['context']:,} + {workload['output']:,}) tokens"
    lines = [f"{decision['reason'][0].upper()}{decision['reason'][1:]}.", f"Packs: {decision['activation']}."]
    candidates = [
        (
            row["policy"],
            "chosen" if row["chosen"] else row["decision"],
            *(shown(row["metrics"][name]) for name in ("bits", "bytes", "kl", "kl_p99", "itl")),
            "; ".join(f"{gate['name']} ({gate['detail'] or shown(gate['measured'])})" for gate in row["failed"]) or "–",
        )
        for row in receipt["candidates"]
    ]
    head = ("policy", "decision", "bits", "bytes ratio", "KL", "KL p99", "ITL ratio", "gates not passed")
    return [
        Section("Why", [*lines, f"Target workload: {target}.", _gates(receipt["gates"])]),
        Section("All candidates", [Table(head, candidates)]),
    ]


def _what(receipt: Mapping[str, Any]) -> list[Section]:
    policy, tensors = receipt["policy"], receipt["tensors"]
    shape = tensors["shape"]
    runs = [
        (f"{run['first']}–{run['last']}" if run["first"] < run["last"] else str(run["first"]), run["key"], run["value"])
        for run in policy["quantizers"]
    ]
    fields = [
        ("policy id", policy["id"]),
        ("sink tokens", shown(policy["sink_tokens"])),
        ("residual window", shown(policy["residual_window"])),
        ("block", shown(policy["block"])),
        ("prefill", policy["prefill"]),
        ("escalation", shown(policy["escalation"])),
        ("rollback", shown(policy["rollback"])),
        ("clipping", policy["clipping"]),
        ("bits per packed element, scales and headers included", shown(policy["bits_per_element"])),
        ("packs from", f"{policy['min_length']:,} tokens"),
        ("certified up to", "any length" if policy["max_length"] is None else f"{policy['max_length']:,} tokens"),
    ]
    numbers = f"{shape['layers']} layers × {shape['kv_heads']} KV heads × {shape['head_dim']} channels"
    reference = (
        f"Keys and values: {numbers} each, {shape['query_heads']} query heads. Reference dtype: {tensors['dtype']}. "
        f"Positions: {shown(tensors['positions'])}. RoPE: {flat(tensors['rope'])}."
    )
    return [
        Section("Policy", [Table(("field", "value"), fields), Table(("layers", "keys", "values"), runs)]),
        Section("Tensors", [reference]),
    ]


def _costs(receipt: Mapping[str, Any]) -> list[Section]:
    memory = [
        (
            shown(row["batch"]),
            shown(row["tokens"]),
            *(size(row[name]) for name in ("reference", "ideal", "format", "held")),
        )
        for row in receipt["memory"]
    ]
    head = ("batch", "tokens", "exact", "ideal codes", "format", "held")
    latency = receipt["latency"] or {}
    columns = ["phase", "batch", "context", "generated", "reference_p50_ms", "candidate_p50_ms"]
    columns += ["reference_p95_ms", "candidate_p95_ms", "ratio", "ratio_low", "ratio_high"]
    rows = [tuple(shown(row.get(name)) for name in columns) for row in latency.get("rows") or []]
    even = [
        (batch, row["verdict"], *(shown(row.get(name)) for name in ("tokens", "low", "high")))
        for batch, row in sorted((latency.get("break_even") or {}).items(), key=lambda item: int(item[0]))
    ]
    extra = [f"{name}: {flat(latency.get(key))}." for name, key in (
        ("Capacity", "capacity"), ("Energy", "energy"), ("Noise floor", "noise_floor"), ("Headline", "headline")
    )]  # fmt: skip
    escalated = f"Escalated blocks over all evaluated prompts: {shown(receipt['escalated_blocks'])}."
    table: list[Block] = (
        [Table([c.replace("_", " ") for c in columns], rows)] if rows else [f"Latency: {NOT_MEASURED}."]
    )
    table += (
        [Table(("batch", "break-even", "tokens", "low", "high"), even)] if even else [f"Break-even: {NOT_MEASURED}."]
    )
    return [Section("Memory", [Table(head, memory), escalated]), Section("Latency", [*table, *extra])]


def _where(receipt: Mapping[str, Any]) -> list[Section]:
    names = ("layer", "bucket", "key_cosine", "value_cosine", "kl", "prompt")
    cells = [
        (policy, *(shown(row[name]) for name in names))
        for policy, worst in receipt["worst_cells"].items()
        for row in worst
    ]
    head = ("policy", "layer", "from position", "key cosine", "value cosine", "KL alone", "worst prompt")
    columns = ["layer", "key_bits", "value_bits", "saved_bytes"]
    columns += ["key_cosine", "value_cosine", "key_error", "value_error", "kl", *ATTENTION, "latency_share"]
    layers = [tuple(blank(row[name]) for name in columns) for row in receipt["layers"]]
    added = [
        (policy, row["prompt"], shown(row["predicted"]), shown(row["measured"]))
        for policy, rows in receipt["interaction"].items()
        for row in rows
    ]
    adding = Table(("policy", "prompt", "sum of cells alone", "whole stack"), added)
    pictures = [Picture(Path(path).stem, path) for path in receipt["figures"]]
    return [
        Section("Worst cells", [Table(head, cells) if cells else "Nothing is packed.", *pictures]),
        Section("Interaction", ["KL in nats: do isolated effects add up?", adding if added else f"{NOT_MEASURED}."]),
        Section("Layer map", [Table([name.replace("_", " ") for name in columns], layers)]),
    ]


def _behaviour(receipt: Mapping[str, Any]) -> list[Section]:
    names = (
        "items",
        "right",
        "drifted",
        "gained",
        "bound",
        "status",
        "needed",
        "p_value",
        "kl",
        "kl_high",
        "same_top1",
    )
    cohorts = [
        (row["cohort"] + (" (critical)" if row["critical"] else ""), *(blank(row[name]) for name in names))
        for row in receipt["cohorts"]
    ]
    head = ["cohort", "items", "right", "drifted", "gained", "drift bound", "rule", "needs", "McNemar p"]
    head += ["KL", "KL high", "same top-1"]
    changes = [
        (row["policy"], row["mode"], *(shown(row[name]) for name in ("changed", "drift", "gain")), flat(row["kinds"]))
        for row in receipt["changes"]
    ]
    logits = f"Logits: {flat(receipt['logits'])}."
    floor = f"Noise floor, the reference against itself in another batch: {flat(receipt['noise_floor'])}."
    recall = [
        (
            shown(row["length"]),
            shown(row["depth"]),
            *(shown(row[n]) for n in ("items", "reference", "candidate", "kept")),
        )
        for row in receipt["recall"]
    ]
    table = Table(("policy", "mode", "changed", "drift", "gain", "kinds"), changes)
    full = "Each one whole: `changed_examples.html`, or data/changed_examples.jsonl."
    grid = Table(("length", "depth", "items", "reference", "candidate", "kept"), recall)
    return [
        Section("Cohorts", [Table(head, cohorts), logits, floor]),
        Section("Cohorts of every candidate", [*_by_policy(receipt["cohorts_by_policy"])]),
        Section("Needle recall", [grid if recall else f"{NOT_MEASURED}."]),
        Section("Changed examples", [table if changes else "No generation changed.", full]),
    ]


def _by_policy(tables: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[Block]:
    """Drift and mean KL, a row a cohort and a column a policy."""
    names = list(dict.fromkeys(row["cohort"] for rows in tables.values() for row in rows))
    found = {(policy, row["cohort"]): row for policy, rows in tables.items() for row in rows}

    def drifts(row: Mapping[str, Any] | None) -> str:
        return "–" if row is None or row["status"] is None else f"{row['drifted']} of {row['right']}, {row['status']}"

    def kl(row: Mapping[str, Any] | None) -> str:
        return "–" if row is None else blank(row["kl"])

    blocks: list[Block] = []
    for what, text in (("Drift, of what the reference gets right", drifts), ("Mean KL in nats", kl)):
        rows = [(name, *(text(found.get((policy, name))) for policy in tables)) for name in names]
        blocks += [f"{what}:", Table(("cohort", *tables), rows)]
    return blocks


def _safety(receipt: Mapping[str, Any]) -> list[Section]:
    checks = [
        (row["name"], shown(row["passed"]), shown(row.get("detail", ""))) for row in receipt["fallback"]["checks"]
    ]
    proof: list[Block] = [Table(("drill", "passed", "detail"), checks)] if checks else [f"Drill: {NOT_MEASURED}."]
    exact = receipt["fallback"]["exact"]
    proof += ["The exact policy through the same runtime:", _gates(exact)] if exact else ["Exact policy: not measured."]
    alarms = [(row["signal"], shown(row["measured"]), shown(row["alarm_above"])) for row in receipt["alarms"]]
    engines = [(row["engine"], row["flag"] or "–", row["nearness"], row["note"]) for row in receipt["engines"]]
    return [
        Section("Not covered", [Table(("what",), [(line,) for line in receipt["unsupported"]])]),
        Section("Fallback proof", proof),
        Section("Rollout alarms", [Table(("signal", "in this evaluation", "alarm above"), alarms)]),
        Section("Engine flags", [Table(("engine", "nearest setting", "nearness", "note"), engines)]),
    ]


def _provenance(receipt: Mapping[str, Any]) -> list[Section]:
    facts = [("calibration", flat(receipt["calibration"]))]
    facts += [
        (name.replace("_", " "), flat(value))
        for name, value in sorted((receipt["device"] or {}).items())
        if value is not None
    ]
    facts += [(name, shown(value)) for name, value in sorted((receipt["software"] or {}).items())]
    hashes = sorted(receipt["hashes"].items())
    return [
        Section("Kernels, device and calibration", [Table(("fact", "value"), facts)]),
        Section("Hashes (sha256)", [Table(("of", "hash"), hashes)]),
    ]
