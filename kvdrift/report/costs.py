"""What packing costs and saves, laid out for reading: bytes at several lengths, latency, capacity and break-even."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvdrift.report.frontier import BreakEven, in_words
from kvdrift.report.page import NOT_MEASURED, Block, Picture, Section, Table, blank, flat, shown, size

COMPUTED = "computed, not measured at this length"


def costs(receipt: Mapping[str, Any], pictures: Mapping[str, Picture]) -> list[Section]:
    """Memory, latency and break-even, capacity."""
    return [
        Section("Memory", _memory(receipt)),
        Section("Latency", [*_latency(receipt), *pictures.values()]),
        Section("Capacity", _capacity(receipt)),
    ]


def _memory(receipt: Mapping[str, Any]) -> list[Block]:
    rows = [
        (
            shown(row["batch"]),
            shown(row["tokens"]) + _marks(row),
            *(size(row[name]) for name in ("reference", "ideal", "format")),
            COMPUTED if row["held"] is None else size(row["held"]),
            shown(row["format"] / row["reference"]),
        )
        for row in receipt["memory"]
    ]
    head = ("batch", "tokens", "exact cache", "ideal codes", "format", "held", "format over exact")
    explained = (
        "`format` counts everything that the cache holds when it packs: codes, scales, headers, exact tokens, the room "
        "of the next block, its exact shadow for rollback, tables. `held` was read off the storages. "
        "Above 1, packing costs memory."
    )
    escalated = f"Blocks that had to stay exact, over all evaluated prompts: {shown(receipt['escalated_blocks'])}."
    return [explained, Table(head, rows), escalated]


def _marks(row: Mapping[str, Any]) -> str:
    marks = [mark for mark, there in (("target workload", row["target"]), ("byte break-even", row["smaller"])) if there]
    return f" ({', '.join(marks)})" if marks else ""


def _latency(receipt: Mapping[str, Any]) -> list[Block]:
    latency, policy = receipt["latency"], receipt["decision"]["policy"]
    if not latency:
        return [f"Latency: {NOT_MEASURED}."]
    blocks: list[Block] = [_paths(receipt["attention"]), _headline(latency, policy), _noise(latency)]
    blocks += [sentence for sentence in [attention_gain(receipt["attention"])] if sentence]
    blocks += [
        "Every setting that was measured; – is a percentile that so few steps can't carry:",
        _rows(latency, policy),
    ]
    if peers := latency.get("peers"):
        rows = [
            (name, *((peer, "–") if isinstance(peer, str) else (shown(peer["value"]), interval(peer))))
            for name, peer in sorted(peers.items())
        ]
        blocks += ["Transformers' other caches at the workload:", Table(("cache", "step over exact", "95 %"), rows)]
    blocks += [_machine(machine)] if (machine := latency.get("machine")) else []
    return [*blocks, *_break_even(receipt, latency)]


def _paths(attention: Mapping[str, Any]) -> str:
    return f"Attention on the reference path: {attention['reference']}. On the packed path: {attention['candidate']}."


def attention_gain(attention: Mapping[str, Any]) -> str | None:
    """How much of the gain all candidates share, whatever their bits: that much comes from the attention path.

    None with fewer than two measured candidates, which can't tell the two apart.
    """
    known = [row for row in attention["policies"] if row["itl"] is not None and row["bits"] is not None]
    if len(known) < 2:
        return None
    ratios, bits = ([row[name] for row in known] for name in ("itl", "bits"))
    least, most = min(ratios), max(ratios)
    text = (
        f"Where the gain comes from: the decode step over the reference's is {shown(least)} to {shown(most)} for all "
        f"{len(known)} candidates, from {shown(min(bits))} to {shown(max(bits))} bits. "
    )
    shared, spread = 1 - most, most - least
    if shared > spread:
        text += (
            f"So at least {shown(shared)} of a step is saved at any number of bits and at most {shown(spread)} depends "
            "on the policy: most of the gain is the attention path, this kernel instead of the reference's function, "
            "and not the bits. Against a faster exact attention it would be smaller."
        )
    else:
        text += f"The candidates differ by {shown(spread)}, no less than the gain that all share: the policy matters."
    if attention["exact_itl"] is not None:
        exact = shown(attention["exact_itl"])
        text += f" The exact policy, which runs the reference's function in the same runtime, has {exact}."
    times = [row["attention_ms"] for row in known if row["attention_ms"] is not None]
    if times and attention["exact_ms"] is not None:
        text += (
            f" Timed inside the steps, attention takes {shown(attention['exact_ms'])} ms of the exact policy's, and "
            f"{shown(min(times))} to {shown(max(times))} ms of the candidates'."
        )
    return text


def _headline(latency: Mapping[str, Any], policy: str) -> Table:
    """The figures at the target workload: reference, policy, ratio and its interval."""
    head, rows = latency.get("headline") or {}, latency.get("rows") or []
    none: Mapping[str, Any] = {}
    step = rows[0] if rows else none
    context = head.get("ttft_context")
    first = next((row for row in rows if row["phase"] == "prefill" and row["context"] == context), none)

    def median(name: str, row: Mapping[str, Any], ratio: float | None, bounds: str) -> tuple[str, ...]:
        return name, ms(row.get("reference_p50_ms")), ms(row.get("candidate_p50_ms")), blank(ratio), bounds

    def held(name: str, of: str) -> tuple[str, ...]:
        before, after = head.get(f"reference_{of}"), head.get(of)
        return name, size(before), size(after), blank(after / before if before and after is not None else None), "–"

    p95 = ms(head.get("p95_reference_ms")), ms(head.get("p95_ms")), blank(head.get("p95_ratio"))
    speeds = [blank(step.get(name)) for name in ("reference_tokens_per_second", "tokens_per_second")]
    return Table(
        ("at the target workload", "reference", policy, "ratio", "95 % interval"),
        [
            median("decode step, median", step, head.get("itl_ratio"), interval(head, "itl_ratio_")),
            ("decode step, 95th percentile", *p95, interval(head, "p95_ratio_")),
            median(
                f"first token, {blank(context)} tokens in", first, head.get("ttft_ratio"), interval(first, "ratio_")
            ),
            ("tokens a second", *speeds, "–", "–"),
            held("bytes that the cache holds", "held_bytes"),
            held("the same with the peak of a decode step", "peak_bytes"),
        ],
    )


def _noise(latency: Mapping[str, Any]) -> str:
    floor = latency.get("noise_floor") or {}
    energy = latency.get("energy")
    shown_energy = flat(energy) if isinstance(energy, Mapping) else shown(energy)
    return (
        f"Noise floor: the reference against itself gave a ratio of {shown(floor.get('value'))} "
        f"({interval(floor)}); what lies within is no difference. Energy: {shown_energy}."
    )


def _machine(machine: Mapping[str, Any]) -> str:
    """What the timings were taken on, and what else ran beside them."""
    before, after = machine["before"], machine["after"]
    return (
        f"Taken with {_count(machine['threads'], 'thread')} on {_count(machine['processors'], 'processor')} that the "
        f"process may use, {machine['backend']} kernels, "
        f"torch {machine['torch']}, transformers {machine['transformers']}, python {machine['python']}. Clock in MHz: "
        f"{shown(before['clock_mhz'])} before, {shown(after['clock_mhz'])} after. Load of the machine, of which this "
        f"measurement is {machine['threads']}: {shown(before['load'])} before, {shown(after['load'])} after."
    )


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def _rows(latency: Mapping[str, Any], policy: str) -> Table:
    head = ["phase", "cache", "batch", "context, tokens", "pairs"]
    head += [f"{side} {name}" for name in ("p50", "p95") for side in ("reference", policy)]
    rows = []
    for row in latency.get("rows") or []:
        figures = [ms(row.get(f"{side}_{name}_ms")) for name in ("p50", "p95") for side in ("reference", "candidate")]
        where = (row["phase"], row.get("reuse", "fresh").replace("_", " "), shown(row["batch"]), shown(row["context"]))
        rows.append((*where, blank(row.get("pairs")), *figures, shown(row.get("ratio")), interval(row, "ratio_")))
    return Table([*head, "ratio", "95 % interval"], rows)


def _break_even(receipt: Mapping[str, Any], latency: Mapping[str, Any]) -> list[Block]:
    even = BreakEven(**receipt["decision"]["break_even"])
    if not receipt["decision"]["packs"]:
        return ["Break-even: none, since nothing is packed."]
    words = (
        f"Break-even in time and in bytes: {in_words(even.faster, 'faster')} (where two fitted lines cross, batch "
        f"{receipt['workload']['batch']}); {in_words(even.smaller, 'smaller')} (by the ledger at every length, the "
        "same for every batch). The policy packs from the larger of the two on, so that it is both; under memory "
        "pressure the router packs from the second on, since a shorter cache would grow."
    )
    rows = [
        (batch, row["verdict"], blank(row.get("tokens")), interval(row), blank(row.get("confidence")))
        for batch, row in sorted((latency.get("break_even") or {}).items(), key=lambda item: int(item[0]))
    ]
    head = ("batch", "decode step over length", "faster from, tokens", "95 % interval", "resamples that agree")
    return [words, Table(head, rows) if rows else f"Latency break-even: {NOT_MEASURED}."]


def _capacity(receipt: Mapping[str, Any]) -> list[Block]:
    found = (receipt["latency"] or {}).get("capacity")
    if not found:
        return [f"Capacity: {NOT_MEASURED}."]
    context = f" of {found['context']:,} tokens" if "context" in found else ""
    bandwidth = found.get("copy_bandwidth")
    bound = f", at {bandwidth / 1e9:,.1f} GB/s of a copy" if bandwidth is not None else ""
    figures = [
        (f"sequences{context} that decode within {size(found['budget_bytes'])}", "sequences", shown),
        ("as the ledger predicts", "predicted_sequences", shown),
        ("bytes that they hold", "held_bytes", size),
        ("decode step of all of them", "step_ms", ms),
        (f"reading weights and cache once{bound}", "bandwidth_bound_step_ms", ms),
    ]

    def key(name: str) -> str:
        return (
            name.replace("predicted_", "predicted_reference_") if name.startswith("predicted_") else f"reference_{name}"
        )

    rows = [(words, form(found.get(key(name))), form(found.get(name))) for words, name, form in figures]
    return [Table(("", "reference", receipt["decision"]["policy"]), rows)]


def ms(value: Any) -> str:
    """Milliseconds; a dash where there are too few steps for the figure."""
    return "–" if value is None else f"{shown(value)} ms"


def interval(bounds: Mapping[str, Any], prefix: str = "") -> str:
    """`0.303 to 0.313`, a dash without bounds."""
    low, high = bounds.get(f"{prefix}low"), bounds.get(f"{prefix}high")
    return "–" if low is None or high is None else f"{shown(low)} to {shown(high)}"
