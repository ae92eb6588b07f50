"""JSON that is taken for nothing on trust: read strictly, its figures finite and in range.

This file knows plain values. It knows no table and no artifact.
"""

from __future__ import annotations

import json
import math
import reprlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LARGEST = 2**53
"""Integers up to here are floats too; nothing that is counted here comes near."""


@dataclass(frozen=True)
class Number:
    """A finite number from `low` to `high`, a whole one if it says so. A boolean is none."""

    low: int | float = -LARGEST
    high: int | float = LARGEST
    whole: bool = False
    or_null: bool = False

    def __str__(self) -> str:
        least = "" if self.low == -LARGEST else f" from {self.low:g}"
        most = "" if self.high == LARGEST else f" to {self.high:g}"
        return f"a {'whole ' if self.whole else ''}number{least}{most}{' or null' if self.or_null else ''}"

    def fits(self, value: object) -> bool:
        if value is None:
            return self.or_null
        kinds = int if self.whole else int | float
        return isinstance(value, kinds) and not isinstance(value, bool) and self.low <= value <= self.high


Wanted = Any
"""What a JSON value has to be: a Number, bool, str, a tuple of the values allowed, {key: wanted}, [wanted] with at
least one item, Each(wanted), Many(wanted), or Either(wanted, …)."""


@dataclass(frozen=True)
class Each:
    """An object with any keys, whose values are all alike."""

    wanted: Wanted


@dataclass(frozen=True)
class Many:
    """A list of any length, whose items are all alike."""

    wanted: Wanted


class Either:
    """One or the other; a fault is told of the last."""

    def __init__(self, *options: Wanted) -> None:
        self.options = options


def read(path: Path, finite: bool = False) -> Any:
    """What `loads` makes of a file. Raises ValueError, one line that names the file, if it can't be read."""
    try:
        return loads(path.read_text(encoding="utf-8"), finite)
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} can't be read: {error}") from error


def loads(text: str, finite: bool = False) -> Any:
    """JSON; `finite` refuses NaN, infinities and integers beyond 64 bits, which Python's own reader lets pass.

    Raises ValueError on these, on a key that comes twice, and on nesting too deep to follow.
    """
    numbers: dict[str, Any] = (
        {"parse_constant": _refused, "parse_float": _finite, "parse_int": _short} if finite else {}
    )
    try:
        return json.loads(text, object_pairs_hook=_unique, **numbers)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"the key {key!r} comes twice")
        found[key] = value
    return found


def _refused(text: str) -> float:
    raise ValueError(f"{text} is no number of JSON")


def _finite(text: str) -> float:
    return float(text) if math.isfinite(float(text)) else _refused(text)


def _short(text: str) -> int:
    if len(text) > len(str(2**63)) or abs(int(text)) >= 2**63:
        raise ValueError(f"{reprlib.repr(text)} is beyond 64 bits")
    return int(text)


def value_fault(value: object, wanted: Wanted, at: str) -> str | None:
    """What keeps `value`, plain data, from being what is wanted; `at` is what it is called."""
    if isinstance(wanted, Either):
        faults = [value_fault(value, option, at) for option in wanted.options]
        return None if None in faults else faults[-1]
    if isinstance(wanted, Many):
        if value == []:
            return None
        wanted = [wanted.wanted]
    if isinstance(wanted, Each):
        wanted = dict.fromkeys(value, wanted.wanted) if isinstance(value, Mapping) else {}
    if isinstance(wanted, dict):
        if not isinstance(value, Mapping):
            return f"{at} is {reprlib.repr(value)}; allowed: an object"
        absent = next((key for key in wanted if key not in value), None)
        if absent is not None:
            return f"{at} has no {absent}"
        return _first(value_fault(value[key], each, f"{at}.{key}") for key, each in wanted.items())
    if isinstance(wanted, list):
        if not isinstance(value, list) or not value:
            return f"{at} is {reprlib.repr(value)}; allowed: a list that is not empty"
        return _first(value_fault(item, wanted[0], f"{at}[{index}]") for index, item in enumerate(value))
    if wanted is None:
        fits, allowed = value is None, "null"
    elif isinstance(wanted, Number):
        fits, allowed = wanted.fits(value), str(wanted)
    elif isinstance(wanted, tuple):
        fits, allowed = isinstance(value, str) and value in wanted, ", ".join(wanted)
    else:
        fits, allowed = type(value) is wanted, {str: "a text", bool: "true or false"}[wanted]
    return None if fits else f"{at} is {reprlib.repr(value)}; allowed: {allowed}"


def difference(found: object, expected: object, at: str) -> str | None:
    """Where `found`, plain data, first differs from what is expected; `at` is what it is called.

    Numbers may differ by rounding, as another machine's sums do.
    """
    if isinstance(expected, dict) and isinstance(found, dict):
        if odd := sorted(expected.keys() ^ found.keys()):
            return f"{at} has {'no' if odd[0] in expected else 'an unknown'} {odd[0]}"
        return _first(difference(found[key], expected[key], f"{at}.{key}") for key in expected)
    if isinstance(expected, list) and isinstance(found, list) and len(expected) == len(found):
        pairs = enumerate(zip(found, expected, strict=True))
        return _first(difference(*pair, f"{at}[{index}]") for index, pair in pairs)
    if Number(-math.inf, math.inf).fits(expected) and Number(-math.inf, math.inf).fits(found):
        same = math.isclose(found, expected, rel_tol=1e-6, abs_tol=1e-12)  # type: ignore[arg-type]
    else:
        same = type(found) is type(expected) and found == expected
    return None if same else f"{at} is {reprlib.repr(found)}; expected: {reprlib.repr(expected)}"


def _first(faults: Iterable[str | None]) -> str | None:
    return next((fault for fault in faults if fault), None)
