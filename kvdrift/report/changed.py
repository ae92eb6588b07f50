"""Changed examples, kept whole: what the reference said, what the candidate said, and what kind of change it is."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import polars as pl

KINDS = {
    "arguments": "tool argument",
    "citation": "citation",
    "refusal": "safety decision",
    "number": "exact string",
    "exact": "exact string",
}
"""Task → what a changed outcome of it means; any other task, and a change that leaves the outcome alone, is `other`."""

DROPPED = ("tokens_reference", "tokens")
"""Columns that the text says as well; `data/generate` archives them."""


def changed_examples(policy: str, generations: pl.DataFrame | None) -> list[dict[str, Any]]:
    """A row a generation that differs from the reference's: greedy ones first, outcome changes before mere wording."""
    if generations is None:
        return []
    rows = []
    for row in generations.filter(pl.col("first_divergence").is_not_null()).iter_rows(named=True):
        kept = {name: value for name, value in row.items() if name not in DROPPED} | {
            "policy": policy,
            "changed": _kind(row),
        }
        kept["position"] = row["length"] + row["first_divergence"]
        kept["outcome"] = _outcome(row)
        rows.append(kept)
    order = {"drift": 0, "gain": 1, "same": 2}
    return sorted(rows, key=lambda row: (row["mode"] != "greedy", order[row["outcome"]], row["cohort"], row["prompt"]))


def _outcome(row: dict[str, Any]) -> str:
    if row["correct_reference"] == row["correct"]:
        return "same"
    return "drift" if row["correct_reference"] else "gain"


def _kind(row: dict[str, Any]) -> str:
    if row["refused_reference"] != row["refused"]:
        return "safety decision"
    same = row["score_reference"] == row["score"] and row["correct_reference"] == row["correct"]
    return "other" if same else KINDS.get(row["task"], "other")


def change_counts(rows: list[dict[str, Any]], critical: Collection[str]) -> list[dict[str, Any]]:
    """A row a policy and mode: generations that changed, drifted, gained, and how many of each kind.

    All cohorts count; `critical_drift` is how many of those that drifted are of a critical one.
    """
    counts: dict[tuple[str, str], dict[str, Any]] = {}
    for row in rows:
        key = row["policy"], row["mode"]
        empty = {
            "policy": key[0],
            "mode": key[1],
            "changed": 0,
            "drift": 0,
            "critical_drift": 0,
            "gain": 0,
            "kinds": {},
        }
        count = counts.setdefault(key, empty)
        count["changed"] += 1
        if row["outcome"] != "same":
            count[row["outcome"]] += 1
        count["critical_drift"] += row["outcome"] == "drift" and row["cohort"] in critical
        count["kinds"][row["changed"]] = count["kinds"].get(row["changed"], 0) + 1
    return [counts[key] for key in sorted(counts)]
