"""Print the decision table of the last run, and where to look next: `python -m kvdrift.report.show`"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

WIDTH = 120
NUMBERS = ("bits", "bytes", "kl", "kl_p99", "top1", "min_cos", "drift", "recall", "itl", "even")


def table(policies: Sequence[Mapping[str, Any]]) -> str:
    """A row a policy, at most WIDTH characters wide; the gates that it did not pass stand in the last column."""
    rows = [["policy", "decision", *NUMBERS, "gates not passed"]]
    for row in policies:
        numbers = [_number(row["metrics"].get(name)) for name in NUMBERS]
        failed = ", ".join(gate["name"] for gate in row["failed"]) or "-"
        rows.append([row["policy"], "chosen" if row["chosen"] else row["decision"], *numbers, failed])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for texts in rows:
        cells = [text.ljust(widths[n]) if n < 2 else text.rjust(widths[n]) for n, text in enumerate(texts[:-1])]
        line = "  ".join([*cells, texts[-1]])
        lines.append(line if len(line) <= WIDTH else line[: WIDTH - 1] + "…")
    return "\n".join(lines)


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m kvdrift.report.show", description="print the decision table")
    parser.add_argument("--decisions", type=Path, default=Path("data/release/decisions.json"))
    options = parser.parse_args(arguments)
    if not options.decisions.is_file():
        print(f"error: there is no {options.decisions}; run `dvc repro`, or `dvc pull` a run", file=sys.stderr)
        return 1
    content = json.loads(options.decisions.read_text())
    decision = content["decision"]
    print(f"{table(content['policies'])}\n")
    print(f"decision: {decision['policy']}: {decision['reason']}")
    print(f"packs: {decision['activation']}\n")
    for name, path in content["paths"].items():
        print(f"{name:9} {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
