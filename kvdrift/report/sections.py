"""A receipt laid out for reading: a title that says the decision, then sections of text and tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvdrift.report.behaviour import behaviour, losses
from kvdrift.report.costs import costs
from kvdrift.report.frontier import brief, unmet
from kvdrift.report.maps import HEARD, maps
from kvdrift.report.page import NOT_MEASURED, Block, Picture, Section, Table, blank, flat, shown
from kvdrift.report.provenance import provenance

CAPTIONS = {
    "heatmap": "Where the error lands: 1 − cosine of keys and values, KL of the next token; grey: unmeasured, or exact",
    "attention": "What each cell does to attention: its keys to the weights, its values and both to the output",
    "recall": "Needles recalled, by prompt length and depth; grey: none planted, hatched: the reference recalls none",
    "frontier": "Bytes against mean KL of every policy, the chosen one starred",
    "latency": "Decode step over context on both paths, with both break-evens",
}
GATES = {
    "evidence": "faults in the artifacts that the verdict rests on",
    "bytes ratio": "whole cache over the exact cache's bytes, at the target workload",
    "reconciled": "share of lengths at which the storages hold what the ledger counts, to the byte",
    "peak ratio": "cache and peak of a decode step over the exact cache's, at the target workload",
    "p95 ratio": "95th percentile of a decode step over the reference's, at the target workload",
    "cell cos": "least mean cosine of any cell, keys or values",
    "cell kl": "most KL of any cell quantized alone, nats",
    "kl": "mean KL of the next token, nats",
    "kl p99": "99th percentile of it, nats",
    "kl max": "largest KL of the next token, nats",
    "cohort kl": "mean KL of the worst cohort, nats",
    "same top-1": "share of tokens with the same most likely token",
    "needle recall": "share of recalled needles that are kept, at the worst length",
    "saturated": "largest share of a layer's elements outside the calibrated range",
    "changed generations": "generations that differ from the reference's",
    "drill": "share of the drill's checks that passed",
}
RAILS = (
    "Each rail is tripped on purpose and passes if it does what it is there for. Damage, another tenant's block and "
    "another model's header have to be rejected by name. A request that is too long, of another shape, or with values "
    "that calibration never saw has to go to a policy that can serve it. Outliers may go to any policy of at least 8 "
    "bits, which is deemed safe for them, so `served by int8` is as good an outcome as `exact`, even where int8 is the "
    "policy under test. Lack of memory has to end in a shorter prompt, an eviction or a refusal with the figures. "
    "Limits in this table, such as 1,024 tokens in `too long`, are the drill's own, set before anything is certified; "
    "the certified length stands under Policy."
)


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
    pictures = {Path(path).stem: Picture(CAPTIONS[Path(path).stem], path) for path in receipt["figures"]}

    def of(name: str) -> dict[str, Picture]:
        return {name: pictures[name]} if name in pictures else {}

    return [
        *_why(receipt, of("frontier")),
        *costs(receipt, of("latency")),
        *behaviour(receipt, of("recall")),
        *_where(receipt, of("heatmap") | of("attention")),
        *_what(receipt),
        *_safety(receipt),
        *provenance(receipt),
    ]


def _gates(gates: Sequence[Mapping[str, Any]], confidence: float) -> Table:
    rows = [
        (
            gate["name"],
            shown(gate["measured"]),
            f"{gate['sense']} {shown(gate['limit'])}",
            "**" + gate["status"] + "**" if not gate["passed"] else gate["status"],
            f"one-sided {100 * confidence:g} % upper bound of the drift rate"
            if gate["name"].startswith("drift in ")
            else GATES.get(gate["name"], "–"),
            gate["detail"] or "–",
        )
        for gate in gates
    ]
    return Table(("gate", "measured", "limit", "status", "what is measured", "detail"), rows)


def _why(receipt: Mapping[str, Any], pictures: Mapping[str, Picture]) -> list[Section]:
    decision, workload, confidence = receipt["decision"], receipt["workload"], receipt["limits"]["confidence"]
    target = f"{workload['batch']} × ({workload['context']:,} + {workload['output']:,}) tokens"
    lines = [f"{decision['reason'][0].upper()}{decision['reason'][1:]}.", f"Packs: {decision['activation']}."]
    lines += [losses(receipt)] if decision["packs"] else []
    rows: list[tuple[str, ...]] = [
        (
            row["policy"],
            "chosen" if row["chosen"] else row["decision"],
            *(shown(row["metrics"][name]) for name in ("bits", "bytes", "itl")),
            *(brief(row["break_even"][name]) for name in ("faster", "smaller")),
            *(shown(row["metrics"][name]) for name in ("kl", "kl_p99", "drift", "recall")),
            "; ".join(map(unmet, row["failed"])) or "–",
        )
        for row in receipt["candidates"]
    ]
    head = ["policy", "decision", "bits", "bytes ratio", "step ratio", "faster from", "smaller from"]
    head += ["KL", "KL p99", "drift", "recall", "gates not passed"]
    explained = (
        "Bytes and decode step are over the exact cache's at the target workload. `faster from` and `smaller from` are "
        "lengths in tokens, KL is in nats. Drift counts right → wrong in the critical cohorts, greedy. A gate that was "
        "not passed shows its figure beside its limit."
    )
    return [
        Section("Why", [*lines, f"Target workload: {target}.", _gates(receipt["gates"], confidence)]),
        Section("All candidates", [Table(head, rows), explained, *pictures.values()]),
        Section("Not covered", [Table(("what",), [(line,) for line in receipt["unsupported"]])]),
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
        ("sinks, always exact", f"{policy['sink_tokens']:,} tokens"),
        ("residual window, the newest, exact", f"{policy['residual_window']:,} tokens"),
        ("block", f"{policy['block']:,} tokens"),
        ("prefill", policy["prefill"]),
        ("a request it may not serve goes to", shown(policy["escalation"])),
        ("rollback", f"{policy['rollback']:,} tokens"),
        ("clipping", policy["clipping"]),
        ("bits per packed element, scales and headers included", shown(policy["bits_per_element"])),
        ("packs", receipt["decision"]["activation"]),
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


def _where(receipt: Mapping[str, Any], pictures: Mapping[str, Picture]) -> list[Section]:
    names = ("layer", "bucket", "key_cosine", "value_cosine", "kl", "prompt")
    cells = [
        (policy, row["gate"] or "–", *(shown(row[name]) for name in names))
        for policy, worst in receipt["worst_cells"].items()
        for row in worst
    ]
    head = ("policy", "named by", "layer", "from position", "key cosine", "value cosine", "KL alone, nats", "prompt")
    explained = (
        "The cells that the gates `cell cos` and `cell kl` name, then those that use up most of their limits. Cosines "
        "are means over all prompts, KL is with only this cell quantized, on the prompt that shows it worst."
    )
    added = [
        (policy, row["prompt"], shown(row["predicted"]), shown(row["measured"]))
        for policy, rows in receipt["interaction"].items()
        for row in rows
    ]
    adding = Table(("policy", "prompt", "sum of cells alone", "whole stack"), added)
    worst: list[Block] = [explained, Table(head, cells)] if cells else ["Nothing is packed."]
    return [
        Section("Worst cells", [*worst, *pictures.values()]),
        Section("Interaction", ["KL in nats: do isolated effects add up?", adding if added else f"{NOT_MEASURED}."]),
        *maps(receipt),
        Section("Slices", _slices(receipt)),
        Section("Errors over an answer", _steps(receipt)),
    ]


def _slices(receipt: Mapping[str, Any]) -> list[Block]:
    """What the chosen policy does by position, by distance from the current token, by region and by role."""
    names = {"key_error": "key error", "value_error": "value error", "key_logits": "attention logits"}
    names |= {name: text for name, text in HEARD.items() if name != "top_overlap"}
    rows = [
        (row["slice"], blank(row["at"]), blank(row["prompts"]), *(blank(row[name]) for name in names))
        for row in receipt["slices"]
    ]
    explained = (
        "The chosen policy's. One slice of the packed tokens quantized, all others exact; means over layers and over "
        "as many prompts as the row says, so rows of different prompts don't compare. Positions and "
        "distances from the current token are the first token of an octave. Generated is the teacher-forced text "
        "behind the prompt, as far as it was packed too. Errors are relative L2, attention logits "
        "root mean square change, weights Jensen–Shannon divergence in nats. Perplexity, Δ is the candidate's less "
        "the reference's."
    )
    told = ("first", "tokens", "kl", "kl_high", "kl_p99", "kl_max", "same_top1", "perplexity_change")
    head = ("from position", "scored tokens", "KL", "its 95 % high", "p99", "max", "same top-1", "perplexity, Δ")
    scored = Table(head, [tuple(blank(row[name]) for name in told) for row in receipt["logits_by_position"]])
    if not rows:
        return ["Nothing is packed."]
    return [
        explained,
        Table(("slice", "at", "prompts", *names.values()), rows),
        "The next token by its position:",
        scored,
    ]


def _steps(receipt: Mapping[str, Any]) -> list[Block]:
    """Whether errors compound: mean KL by generated step, a column a policy."""
    tables = {policy: {row["first"]: row for row in rows} for policy, rows in receipt["steps"].items() if rows}
    firsts = sorted({first for table in tables.values() for first in table})
    rows = [(shown(first), *(blank(table.get(first, {}).get("kl")) for table in tables.values())) for first in firsts]
    explained = (
        "Mean KL in nats by generated token, on the prompts with the longest answers. Both caches follow the "
        "candidate's own answer, so what differs is the cache, not the text. Does the error grow? Few prompts reach "
        "the last steps."
    )
    return [explained, Table(("from step", *tables), rows)] if rows else [f"{NOT_MEASURED}."]


def _safety(receipt: Mapping[str, Any]) -> list[Section]:
    checks = [
        (row["name"].replace("_", " "), shown(row["passed"]), row.get("detail", ""))
        for row in receipt["fallback"]["checks"]
    ]
    proof: list[Block] = [RAILS]
    proof.append(Table(("drill", "passed", "what it showed"), checks) if checks else f"Drill: {NOT_MEASURED}.")
    proof.append("The exact policy through the same runtime:")
    exact = receipt["fallback"]["exact"]
    proof.append(_gates(exact, receipt["limits"]["confidence"]) if exact else f"{NOT_MEASURED}.")
    alarms = [(row["signal"], blank(row["measured"]), shown(row["alarm_above"])) for row in receipt["alarms"]]
    engines = [(row["engine"], row["flag"] or "–", row["nearness"], row["note"]) for row in receipt["engines"]]
    return [
        Section("Fallback proof", proof),
        Section("Rollout alarms", [Table(("signal", "in this evaluation", "alarm above"), alarms)]),
        Section("Engine flags", [Table(("engine", "nearest setting", "nearness", "note"), engines)]),
    ]
