"""What packing does to answers, laid out for reading: cohorts, needles, and generations that changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvdrift.report.page import NOT_MEASURED, Block, Picture, Section, Table, blank, flat, shown

COHORT = {
    "cohort": "cohort",
    "items": "items",
    "right": "reference right",
    "drifted": "right → wrong",
    "gained": "wrong → right",
    "bound": "drift bound",
    "status": "status",
    "needed": "items still needed",
    "p_value": "McNemar p",
    "kl": "KL, nats",
    "kl_high": "KL, upper",
    "same_top1": "same top-1",
}
LOGITS = {
    "tokens": "scored tokens",
    "kl": "mean KL, nats",
    "kl_low": "its 95 % interval, low",
    "kl_high": "its 95 % interval, high",
    "kl_p99": "99th percentile of KL, nats",
    "kl_p999": "99.9th percentile of KL, nats",
    "kl_max": "largest KL, nats",
    "same_top1": "share of tokens with the same most likely token",
    "rms_delta_p": "RMS change of the target token's probability",
    "rank_correlation": "rank correlation over the reference's top 50",
    "perplexity_change": "perplexity, candidate − reference (a difference, no ratio)",
}


def behaviour(receipt: Mapping[str, Any], pictures: Mapping[str, Picture]) -> list[Section]:
    """Cohorts, of the policy that ships and of all; next-token figures; needle recall; changed examples."""
    return [
        Section("Cohorts", [_rule(receipt), _cohorts(receipt["cohorts"]), *_logits(receipt)]),
        Section("Cohorts of every candidate", _by_policy(receipt["cohorts_by_policy"])),
        Section("Needle recall", [*_recall(receipt), *pictures.values()]),
        Section("Changed examples", _changes(receipt)),
    ]


def _logits(receipt: Mapping[str, Any]) -> list[Block]:
    """Next-token figures of the policy beside those of the exact cache against itself, and answers it changes."""
    own, floor = receipt["logits"] or {}, receipt["noise_floor"] or {"logits": {}, "answers": []}
    columns = {receipt["decision"]["policy"]: own, **{f"floor: {name}": row for name, row in floor["logits"].items()}}
    rows = [(name, *(blank(figures.get(key)) for figures in columns.values())) for key, name in LOGITS.items()]
    answers = "; ".join(
        f"{row['schedule']}, {row['changed']} of {row['answers']} greedy answers changed and {row['outcomes']} outcomes"
        for row in floor["answers"]
    )
    noise = f"Noise floor: the reference against itself under another schedule. {answers or 'Answers: not measured'}."
    return [Table(("next token", *columns), rows), noise]


def losses(receipt: Mapping[str, Any]) -> str:
    """Right answers that the policy turned wrong in one line, both modes, critical cohorts apart."""
    policy = receipt["decision"]["policy"]
    counts = {row["mode"]: row for row in receipt["changes"] if row["policy"] == policy}

    def of(mode: str) -> str:
        row = counts.get(mode) or {"drift": 0, "critical_drift": 0, "gain": 0}
        critical = f"{row['critical_drift']} of them in critical cohorts"
        return f"{mode} {row['drift']} right → wrong, {critical}, and {row['gain']} wrong → right"

    return f"Changed outcomes in all cohorts: {of('greedy')}; {of('sampled')}. The gates read the greedy ones."


def _rule(receipt: Mapping[str, Any]) -> str:
    limits = receipt["limits"]
    confidence = f"{100 * limits['confidence']:g} %"
    return (
        "Drift is an answer that the reference gets right and the candidate gets wrong (right → wrong), decoded "
        f"greedily. `drift bound` is the one-sided {confidence} upper bound (Clopper–Pearson) of its "
        "rate among the answers that the reference gets right. A critical cohort passes if the bound is at most "
        f"{shown(limits['max_drift'])}; the others are not gated, so their status stands in brackets. "
        "A cohort without items has scored text only."
    )


def _cohorts(cohorts: Sequence[Mapping[str, Any]]) -> Table:
    rows = []
    for row in cohorts:
        texts = {name: blank(row[name]) for name in COHORT}
        texts["cohort"] += " (critical)" if row["critical"] else ""
        texts["status"] = _status(row)
        rows.append(tuple(texts.values()))
    return Table(tuple(COHORT.values()), rows)


def _status(row: Mapping[str, Any]) -> str:
    return blank(row["status"]) if row["critical"] or row["status"] is None else f"({row['status']})"


def _by_policy(tables: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[Block]:
    """Drift and mean KL, a row a cohort and a column a policy; cohorts without answers have no row of drift."""
    names = list(dict.fromkeys(row["cohort"] for rows in tables.values() for row in rows))
    found = {(policy, row["cohort"]): row for policy, rows in tables.items() for row in rows}

    def drifts(row: Mapping[str, Any] | None) -> str:
        return "–" if row is None or row["status"] is None else f"{row['drifted']} of {row['right']}, {_status(row)}"

    def kl(row: Mapping[str, Any] | None) -> str:
        return "–" if row is None else blank(row["kl"])

    blocks: list[Block] = []
    for what, text in (("Right → wrong, of what the reference gets right, greedy", drifts), ("Mean KL in nats", kl)):
        rows = [(name, *(text(found.get((policy, name))) for policy in tables)) for name in names]
        told = [row for row in rows if set(row[1:]) != {"–"}]
        blocks += [f"{what}:", Table(("cohort", *tables), told)]
    return blocks


def _recall(receipt: Mapping[str, Any]) -> list[Block]:
    cells = receipt["recall"]
    if not cells:
        return [f"{NOT_MEASURED}."]
    names = ("length", "depth", "items", "reference", "candidate", "kept")
    # of no needle recalled none can be kept: that is no loss
    rows = [
        tuple("–" if name == "kept" and not cell["reference"] else shown(cell[name]) for name in names)
        for cell in cells
    ]
    grid = Table((*names[:3], "reference recalls", "candidate recalls", "kept"), rows)
    return [recall_rule(cells, receipt["limits"]["min_recall"]), grid]


def recall_rule(cells: Sequence[Mapping[str, Any]], least: float) -> str:
    """How few items a cell of the grid has, and what the gate makes of them."""
    items, lengths = [cell["items"] for cell in cells], sorted({cell["length"] for cell in cells})
    right = [sum(cell["reference"] for cell in cells if cell["length"] == length) for length in lengths]
    count = f"{min(items)}" if min(items) == max(items) else f"{min(items)} to {max(items)}"
    text = (
        f"{count} item{'s' if max(items) > 1 else ''} a cell: the grid is a probe without a statistical rule, neither "
        "bound nor interval, so one answer decides a cell and a kept needle proves no rate. The gate `needle recall` "
        "takes, at each length, the share of the needles that the reference recalls which the candidate recalls too, "
        f"and asks for at least {shown(least)} at the worst length. A dash is a cell of which the reference recalls "
        "nothing, so nothing can be kept."
    )
    if any(right):
        fewest = min(n for n in right if n)
        lost = "one loss is enough to reject" if 1 - 1 / fewest < least else "one loss alone does not reject"
        text += f" With {fewest} needles at a length, {lost}."
    return text


def _changes(receipt: Mapping[str, Any]) -> list[Block]:
    rows = [
        (
            row["policy"],
            row["mode"],
            *(shown(row[name]) for name in ("changed", "drift", "critical_drift", "gain")),
            flat(row["kinds"]),
        )
        for row in receipt["changes"]
    ]
    head = ("policy", "mode", "changed", "right → wrong", "in critical cohorts", "wrong → right", "kinds of change")
    explained = (
        "Over all cohorts, critical or not. `greedy` is what the gates read; `sampled` uses the reference's seed, so "
        "one changed token may lead elsewhere, for better or worse."
    )
    full = "Each one whole: `changed_examples.html`, or data/changed_examples.jsonl."
    return [explained, Table(head, rows) if rows else "No generation changed.", full]
