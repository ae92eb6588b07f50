"""The choice: which of the accepted candidates ships, what it is bound to, and where each stands on the frontier."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvdrift.ledger import CacheShape, byte_break_even
from kvdrift.policy import CachePolicy, LayerPolicy
from kvdrift.report import strict
from kvdrift.report.page import NOT_MEASURED, shown
from kvdrift.report.reading import required
from kvdrift.report.verdict import NEVER

EXACT = CachePolicy("exact", (LayerPolicy(),))


@dataclass(frozen=True)
class Choice:
    """The policy that ships and why. `proven` is false when not even the exact policy showed what it has to."""

    policy: str
    packs: bool
    proven: bool
    reason: str


def read_verdict(path: Path, judged: Mapping[str, Any]) -> dict[str, Any]:
    """The verdict that the stage of that name wrote; `judged` is the verdict that the same evidence and limits give.

    Raises ConfigError, one line, if it is missing or damaged, or not what is expected: nothing ships on a file's word.
    """

    def reader(path: Path) -> dict[str, Any]:
        verdict: dict[str, Any] = strict.read(path, finite=True)
        if fault := strict.difference(verdict, json.loads(json.dumps(judged)), "verdict"):
            faults = judged["gates"][0]["detail"]  # of the artifacts, one of which may be what is damaged
            raise ValueError(f"{fault}; {faults}" if faults else fault)
        return verdict

    return required(path, f"verdict@{path.stem}", reader)


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
        share = f"{best['metrics']['bytes']:.3g} of the exact cache's bytes at the target workload"
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


@dataclass(frozen=True)
class BreakEven:
    """The lengths in tokens from which on a policy is `faster` and `smaller` than the exact cache.

    0 is at every length, NEVER at none that was evaluated; None was not measured, or the policy packs nothing.
    """

    faster: int | None
    smaller: int | None

    @property
    def pays(self) -> int | None:
        """From where it is both; None if there is no such length, or it isn't known."""
        evens = self.faster, self.smaller
        return None if None in evens or NEVER in evens else max(even for even in evens if even is not None)


def break_even(policy: CachePolicy, shape: CacheShape, faster: int | None, limit: int) -> BreakEven:
    """Both break-evens of a policy that was evaluated up to `limit` tokens; `faster` is the one that was measured."""
    if policy.is_exact or not limit:
        return BreakEven(None, None)
    smaller = byte_break_even(policy, shape, limit)
    return BreakEven(faster, NEVER if smaller is None else smaller)


def longest(packing: Mapping[str, Any] | None) -> int:
    """The longest sequence in tokens whose cache was held and reconciled, 0 if none was."""
    return max((row["tokens"] for row in (packing or {}).get("memory") or []), default=0)


def bound(policy: CachePolicy, even: BreakEven, limit: int) -> CachePolicy:
    """The released policy: it packs from where it is faster and smaller, and up to `limit`, the longest evaluated.

    One that is never both starts a token beyond that: it packs under memory pressure alone.
    """
    if policy.is_exact:
        return replace(policy, min_length=0, max_length=None)
    start = limit + 1 if even.pays is None else min(max(even.pays, policy.min_length), limit + 1)
    return replace(policy, min_length=start, max_length=limit)


def activation(policy: CachePolicy, even: BreakEven) -> str:
    """When the released policy packs, in words."""
    if policy.is_exact:
        return "never: every token stays exact"
    assert policy.max_length is not None
    end = f"up to {policy.max_length:,} tokens"
    why = f"{in_words(even.faster, 'faster')}, {in_words(even.smaller, 'smaller')}"
    if policy.min_length <= policy.max_length:
        when = f"from {policy.min_length:,} {end} ({why})"
    else:
        when = f"never for speed ({why})"
    if even.smaller is None or not 0 <= even.smaller < policy.min_length:
        return when
    return f"{when}; under memory pressure from {even.smaller:,} {end}"


def in_words(even: int | None, word: str) -> str:
    """A break-even in a sentence: `faster from 136 tokens on`."""
    if even is None:
        return f"{word}: not measured"
    if even == NEVER:
        return f"{word} at no length"
    return f"{word} at every length" if even == 0 else f"{word} from {even:,} tokens on"


def brief(even: int | None) -> str:
    """A break-even in a table."""
    if even is None:
        return "–"
    return {NEVER: "never", 0: "always"}.get(even, f"{even:,}")


def unmet(gate: Mapping[str, Any]) -> str:
    """A gate that was not passed, its figure beside its limit: `bytes ratio 0.973 > 0.6 (ideal codes alone are 0.5)`.

    A figure on the right side of its limit is that of an inconclusive gate, and its limit stands in words.
    """
    measured, limit, detail = gate["measured"], gate["limit"], gate["detail"]
    beyond = {"at most": ">", "at least": "<"}[gate["sense"]]
    if measured is None:
        detail = detail.removeprefix(NOT_MEASURED).strip()
        said = f"{NOT_MEASURED}, {gate['sense']} {shown(limit)} is allowed"
    elif (measured > limit) if beyond == ">" else (measured < limit):
        texts = shown(measured), shown(limit)
        told, bound = texts if texts[0] != texts[1] else (f"{measured:.9g}", f"{limit:.9g}")
        said = f"{told} {beyond} {bound}"
    else:
        said = f"{shown(measured)}, {gate['status']}, {gate['sense']} {shown(limit)} is allowed"
    return f"{gate['name']} {said}{f' ({detail})' if detail else ''}"
