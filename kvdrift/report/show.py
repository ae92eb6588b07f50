"""Print the decision table of the last run, and where to look next: `python -m kvdrift.report.show`"""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvdrift.report.frontier import brief, unmet
from kvdrift.report.page import blank

WIDTH = 160
HEAD = ("policy", "decision", "bits", "bytes", "itl", "faster", "smaller", "kl", "kl_p99", "drift", "recall")
LEGEND = """\
bytes, itl       whole cache and decode step over the exact cache's, at the target workload
faster, smaller  from so many tokens on; drift: right answers turned wrong in critical cohorts, greedy"""


def table(policies: Sequence[Mapping[str, Any]]) -> str:
    """A row a policy, at most WIDTH characters wide, the gates that it did not pass last, as many as fit; below the
    table all of them, each with its figure and its limit."""
    rows = [list(HEAD)]
    for row in policies:
        texts = {name: brief(even) for name, even in row["break_even"].items()}
        texts |= {"policy": row["policy"], "decision": "chosen" if row["chosen"] else row["decision"]}
        rows.append([texts[name] if name in texts else blank(row["metrics"].get(name)) for name in HEAD])
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEAD))]
    head, *lines = [
        "  ".join(f"{text:{'<' if n < 2 else '>'}{widths[n]}}" for n, text in enumerate(row)) for row in rows
    ]
    found, below = [f"{head}  gates not passed"], []
    for line, row in zip(lines, policies, strict=True):
        found.append(f"{line}  {_fitting([gate['name'] for gate in row['failed']], WIDTH - len(line) - 2)}")
        if row["failed"]:
            text = f"{row['policy']} did not pass: {'; '.join(map(unmet, row['failed']))}"
            below += textwrap.wrap(text, WIDTH, subsequent_indent="  ", break_on_hyphens=False)
    return "\n".join([*found, *([""] if below else []), *below]).replace("–", "-")


def _fitting(names: Sequence[str], room: int) -> str:
    """As many whole names as fit, and how many more there are."""
    for count in range(len(names), 0, -1):
        more = f", {len(names) - count} more" if count < len(names) else ""
        text = ", ".join(names[:count]) + more
        if len(text) <= room:
            return text
    return f"{len(names)} gates" if names else "-"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m kvdrift.report.show", description="print the decision table")
    parser.add_argument("--decisions", type=Path, default=Path("data/release/decisions.json"))
    options = parser.parse_args(arguments)
    if not options.decisions.is_file():
        print(f"error: there is no {options.decisions}; run `dvc repro`, or `dvc pull` a run", file=sys.stderr)
        return 1
    content = json.loads(options.decisions.read_text())
    decision = content["decision"]
    print(f"{table(content['policies'])}\n\n{LEGEND}\n")
    print(f"decision: {decision['policy']}: {decision['reason']}")
    print(f"packs: {decision['activation']}\n")
    for name, path in content["paths"].items():
        print(f"{name:9} {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
