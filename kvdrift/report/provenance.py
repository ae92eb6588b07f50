"""What the evidence is bound to, laid out for reading."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvdrift.report.page import Section, Table, flat, shown


def provenance(receipt: Mapping[str, Any]) -> list[Section]:
    """Model, code, machine and calibration, then every hash with the command that shows it again."""
    seen = receipt["calibration"]
    calibration = (
        f"{seen['prompts']:,} prompts, {seen['tokens']:,} tokens, of {shown(seen['cohorts'])}" if seen else None
    )
    facts = [("calibration", shown(calibration)), *_origin(receipt["origin"])]
    facts += [
        (name.replace("_", " "), flat(value))
        for name, value in sorted((receipt["device"] or {}).items())
        if value is not None
    ]
    facts += [(name, shown(value)) for name, value in sorted((receipt["software"] or {}).items())]
    hashes = [tuple(row[name] for name in ("of", "covers", "sha256", "again")) for row in receipt["hashes"]]
    policy = receipt["policy"]
    return [
        Section("Model, code, device and calibration", [Table(("fact", "value"), facts)]),
        Section(
            "Hashes (sha256)",
            [
                f"`policy.json` is the policy {policy['name']} with the id {policy['id']}; it names no model. "
                "This receipt links the two: the hash of that file stands beside those of the weights that it was "
                "evaluated on. Run the commands where `dvc repro` ran; `docs/receipt.md` has more.",
                Table(("of", "covers", "sha256", "again with"), hashes),
            ],
        ),
    ]


def _origin(origin: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Model and code, as precisely as they are known."""
    commit = origin["commit"]
    known = "none: not a git checkout"
    if commit:
        state = "with changes that are not committed" if commit["dirty"] else "without uncommitted changes"
        known = f"{commit['commit']}, {state}"
    return [
        ("model", origin["model"]["id"]),
        ("model revision", origin["model"]["revision_is"]),
        ("git commit of the code", known),
    ]
