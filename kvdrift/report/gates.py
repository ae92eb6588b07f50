"""Gates: a figure beside its limit. They fail closed, so a figure that is absent, null or not finite fails by name.

Run it on a file of layer-position rows; it names the worst cell and exits 0 only if every figure is there and passes:

    python -m kvdrift.report.gates tests/fixtures/layer_position.json
"""

from __future__ import annotations

import argparse
import math
import reprlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from kvdrift.report.limits import CellLimits
from kvdrift.report.strict import Number, read

Status = Literal["pass", "fail", "inconclusive", "not applicable"]

NOT_MEASURED = "not measured"
PLACE = Number(low=0, whole=True)
"""A layer, or a position."""


@dataclass(frozen=True)
class Gate:
    """One judged figure. `sense` says on which side of `limit` the figure has to lie."""

    name: str
    status: Status
    measured: float | None
    sense: Literal["at most", "at least"]
    limit: float
    detail: str = ""

    @property
    def passed(self) -> bool:
        """Only a pass is one, or a gate that can't apply; what is inconclusive is not."""
        return self.status in ("pass", "not applicable")

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"passed": self.passed}


def figure(value: object) -> float | None:
    """`value` as a number, None unless it is one that a float holds, and finite."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= sys.float_info.max:
        return None
    return float(value)


def at_most(name: str, measured: object, limit: float, detail: str = "") -> Gate:
    """Passes if `measured` is a finite number and no more than `limit`."""
    found = figure(measured)
    status: Status = "pass" if found is not None and found <= limit else "fail"
    return Gate(name, status, found, "at most", limit, detail or _missing(measured))


def at_least(name: str, measured: object, limit: float, detail: str = "") -> Gate:
    """Passes if `measured` is a finite number and no less than `limit`."""
    found = figure(measured)
    status: Status = "pass" if found is not None and found >= limit else "fail"
    return Gate(name, status, found, "at least", limit, detail or _missing(measured))


def _missing(measured: object) -> str:
    if measured is None:
        return NOT_MEASURED
    return "" if figure(measured) is not None else f"{reprlib.repr(measured)}: no figure"


def cell_gates(cell: Mapping[str, Any], limits: CellLimits) -> tuple[Gate, Gate]:
    """The gates on `cos` and `kl` of one cell, {layer, pos, cos, kl}; out of its range is as missing."""
    cos, kl = (_within(cell.get(name), low, high) for name, low, high in (("cos", -1.0, 1.0), ("kl", 0.0, math.inf)))
    name = cell_name(cell)
    return at_least(f"{name}: cos", cos, limits.cos), at_most(f"{name}: kl", kl, limits.kl)


def _within(value: object, low: float, high: float) -> object:
    """`value`, or what is wrong with it where it is a number out of its range, give or take rounding."""
    found = figure(value)
    return value if found is None or low - 1e-6 <= found <= high + 1e-6 else f"{found:g}, out of [{low:g}, {high:g}],"


def cell_name(cell: Mapping[str, Any]) -> str:
    """`layer 23 at 2,048`."""
    layer, position = (cell.get(key) if PLACE.fits(cell.get(key)) else None for key in ("layer", "pos"))
    return f"layer {'?' if layer is None else layer} at {'?' if position is None else f'{position:,}'}"


def used(cell: Mapping[str, Any], limits: CellLimits) -> float:
    """The larger share of its limits that a cell uses up: over 1 fails, a missing figure is infinite."""
    cos, kl = (gate.measured for gate in cell_gates(cell, limits))
    if cos is None or kl is None:
        return math.inf
    shares = ((1 - cos, 1 - limits.cos), (kl, limits.kl))
    return max(part / whole if whole > 0 else (math.inf if part > 0 else 0.0) for part, whole in shares)


def layer_position(cells: Sequence[Mapping[str, Any]], limits: CellLimits) -> list[Gate]:
    """Two gates a cell; a cell that doesn't say where it is, or no cell at all, fails."""
    gates: list[Gate] = []
    for index, cell in enumerate(cells):
        for key in ("layer", "pos"):
            if not PLACE.fits(cell.get(key)):
                found = reprlib.repr(cell[key]) if key in cell else "missing"
                gates.append(at_least(f"row {index}: {key}", None, 0.0, f"{found}; allowed: {PLACE}"))
        gates.extend(cell_gates(cell, limits))
    return gates or [at_least("cells", None, 1.0, "there are none")]


def _read(path: Path) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """Rows and limits of a file that is a list of rows, or {rows, limits}."""
    content = read(path)
    content = {"rows": content} if isinstance(content, list) else content
    if not isinstance(content, dict) or not {"rows"} <= set(content) <= {"rows", "limits"}:
        raise ValueError(f'{path} is {reprlib.repr(content)}; allowed: a list of rows, or {{"rows", "limits"}}')
    rows, limits = content["rows"], content.get("limits", {})
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ValueError(f'rows of {path} must be a list of {{"layer", "pos", "cos", "kl"}}')
    known = {key: figure(limit) for key, limit in limits.items()} if isinstance(limits, dict) else {"": None}
    found = {key: limit for key, limit in known.items() if key in ("cos", "kl") and limit is not None}
    if found != known:
        raise ValueError(f"limits of {path} are {reprlib.repr(limits)}; allowed: a number for cos, for kl, or for both")
    return rows, found


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m kvdrift.report.gates", description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path, help='rows of {"layer", "pos", "cos", "kl"}, or {"rows", "limits"}')
    parser.add_argument("--min-cos", type=float, help=f"least cosine of a cell, {CellLimits.cos} by default")
    parser.add_argument("--max-kl", type=float, help=f"most KL of a cell in nats, {CellLimits.kl} by default")
    options = parser.parse_args(arguments)
    try:
        rows, given = _read(options.file)
        flags = {"cos": options.min_cos, "kl": options.max_kl}
        limits = CellLimits(**given | {name: value for name, value in flags.items() if value is not None})
        gates = layer_position(rows, limits)
    except ValueError as error:
        print(f"FAIL: layer-position gates: {'; '.join(map(str, error.args))}")
        return 1
    for row in rows:
        cos, kl = cell_gates(row, limits)
        print(f"{cell_name(row):24} cos {_shown(cos):8} kl {_shown(kl)}")
    if rows:
        worst = max(rows, key=lambda row: used(row, limits))
        cos, kl = cell_gates(worst, limits)
        print(f"worst cell: {cell_name(worst)} (cos {_shown(cos)} of at least {limits.cos:g}, ", end="")
        print(f"kl {_shown(kl)} of at most {limits.kl:g})")
    failed = [gate for gate in gates if not gate.passed]
    for gate in failed:
        print(f"failed: {gate.name} is {gate.detail or f'{gate.measured:g}, {gate.sense} {gate.limit:g} is allowed'}")
    print("FAIL: layer-position gates" if failed else "PASS: layer-position gates")
    return 1 if failed else 0


def _shown(gate: Gate) -> str:
    return "missing" if gate.measured is None else f"{gate.measured:g}"


if __name__ == "__main__":
    sys.exit(main())
