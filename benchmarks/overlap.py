"""Do two runs of the same latency sweep agree? Compares the 95 % intervals of their paired ratios, point by point.

    python stages/latency.py plan=int8 out=first
    python stages/latency.py plan=int8 out=second
    python benchmarks/overlap.py first/int8.json second/int8.json

`ours` and `theirs` are the ratios candidate / reference of the first and the second run, `ratio` is first / second, and
`unit` says whether the intervals overlap. Ends with their share, and status 1 below --least.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rows import Row, machine, report

SETTING = ("phase", "reuse", "batch", "context", "generated")


def compare(first: Sequence[Mapping[str, Any]], second: Sequence[Mapping[str, Any]]) -> list[Row]:
    """A row for each point that both sweeps have and that carries an interval."""
    others = {tuple(row[key] for key in SETTING): row for row in second}
    found = []
    for row in first:
        setting = tuple(row[key] for key in SETTING)
        other = others.get(setting)
        if other is None or None in (row["ratio_low"], other["ratio_low"]):
            continue
        overlap = row["ratio_low"] <= other["ratio_high"] and other["ratio_low"] <= row["ratio_high"]
        case = "{} {} batch {} context {} n {}".format(*setting)
        ours, theirs = row["ratio"], other["ratio"]
        found.append(Row(case, ours, theirs, ours / theirs, "overlap" if overlap else "apart"))
    return found


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("runs", type=Path, nargs=2, help="two latency JSONs of one policy and sweep")
    options.add_argument("--least", type=float, default=0.9, help="share of overlapping intervals")
    options.add_argument("--json", type=Path, help="write the rows here")
    given = options.parse_args()
    rows = compare(*(json.loads(run.read_text())["rows"] for run in given.runs))
    if not rows:
        sys.exit("the two sweeps have no point in common; run the same `latency` group twice")
    print(machine())
    for row in rows:
        print(f"{row.case:55} {row.ours:6.3f} {row.theirs:6.3f}  {row.unit}")
    share = sum(row.unit == "overlap" for row in rows) / len(rows)
    print(f"{share:.0%} of {len(rows)} intervals overlap")
    report(rows, given.json)
    sys.exit(0 if share >= given.least else 1)


if __name__ == "__main__":
    main()
