"""The choice: which of the accepted candidates ships, what it is bound to, and where each stands on the frontier."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvdrift.policy import CachePolicy, LayerPolicy
from kvdrift.report.verdict import NEVER

EXACT = CachePolicy("exact", (LayerPolicy(),))


@dataclass(frozen=True)
class Choice:
    """The policy that ships and why. `proven` is false when not even the exact policy showed what it has to."""

    policy: str
    packs: bool
    proven: bool
    reason: str


def choose(verdicts: Sequence[Mapping[str, Any]]) -> Choice:
    """Among accepted candidates the fewest bytes at the target workload, then the lower KL; else the exact policy.

    No candidate ships beside an exact policy that failed: then the reference path can't be restored.
    """
    candidates = [verdict for verdict in verdicts if not verdict["exact"]]
    accepted = [verdict for verdict in candidates if verdict["decision"] == "accept"]
    proofs = [verdict for verdict in verdicts if verdict["exact"]]
    broken = [verdict for verdict in proofs if verdict["decision"] != "fallback"]
    if broken:
        reason = f"the exact policy {broken[0]['policy']!r} does not restore the reference path, so nothing may ship"
        return Choice(broken[0]["policy"], False, False, reason)
    if accepted:
        best = min(accepted, key=lambda v: (v["metrics"]["bytes"], v["metrics"]["kl"], v["policy"]))
        share = f"{best['metrics']['bytes']:.3g} of the exact cache's bytes"
        among = (
            "the one candidate accepted" if len(accepted) == 1 else f"the least of {len(accepted)} accepted candidates"
        )
        return Choice(best["policy"], True, True, f"{share}, {among}")
    rejected = f"none of {len(candidates)} candidates passed all gates"
    if not proofs:
        return Choice(EXACT.name, False, False, f"{rejected}, and the policies list no exact one to fall back on")
    return Choice(proofs[0]["policy"], False, True, rejected)


def frontier_rows(verdicts: Sequence[Mapping[str, Any]], choice: Choice) -> list[dict[str, Any]]:
    """A row a policy whose bytes and KL were measured, from the fewest bytes on; `pareto` is what none dominates."""
    rows = []
    for verdict in verdicts:
        figures, logits = verdict["metrics"], verdict["logits"]
        if figures["bytes"] is None or figures["kl"] is None:
            continue
        row = {"policy": verdict["policy"], "bytes_ratio": figures["bytes"], "kl": figures["kl"]}
        row |= {"kl_low": logits["kl_low"], "kl_high": logits["kl_high"], "bits": figures["bits"]}
        row |= {"decision": verdict["decision"], "chosen": verdict["policy"] == choice.policy}
        rows.append(row)
    for row in rows:
        row["pareto"] = not any(_dominates(other, row) for other in rows)
        row["mark"] = "chosen" if row["chosen"] else row["decision"]
    return sorted(rows, key=lambda row: (row["bytes_ratio"], row["kl"], row["policy"]))


def _dominates(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    pair = [(row["bytes_ratio"], row["kl"]) for row in (one, other)]
    return pair[0] != pair[1] and pair[0][0] <= pair[1][0] and pair[0][1] <= pair[1][1]


def bound(policy: CachePolicy, even: int | None, longest: int | None) -> CachePolicy:
    """The released policy: packing from its break-even on, and never beyond the longest length that was evaluated.

    A policy that is never faster gets that longest length as its start: it packs under memory pressure alone.
    """
    if policy.is_exact:
        return replace(policy, min_length=0, max_length=None)
    start = policy.min_length if even is None else even
    if longest is not None:
        start = longest if start == NEVER else min(start, longest)
    return replace(policy, min_length=max(start, 0), max_length=longest)


def activation(policy: CachePolicy, even: int | None) -> str:
    """When the released policy packs, in words."""
    if policy.is_exact:
        return "never: every token stays exact"
    end = f", up to {policy.max_length:,} tokens" if policy.max_length is not None else ""
    if even is None:
        return f"break-even not measured: from {policy.min_length:,} tokens on{end}"
    if even == NEVER:
        return f"no break-even, slower at every length: only under memory pressure{end}"
    if even == 0:
        return f"always: faster at every measured length{end}"
    return f"from {policy.min_length:,} tokens on, its break-even; below that only under memory pressure{end}"
