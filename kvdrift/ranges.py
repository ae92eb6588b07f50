"""What the figures of a dataclass may be. Called from its `__post_init__`, so that whoever builds it is told."""

from __future__ import annotations

import math
from collections.abc import Sequence


def require(owner: object, *, filled: Sequence[str] = (), **ranges: tuple[int | float, ...]) -> None:
    """Fields of `owner` lie within their range, every item of a list too, and those `filled` hold items.

    A range is (least, most), or (least, most, step) where multiples of a step alone are allowed. Null is left to the
    field's type; NaN and infinity are never within. Raises ValueError with an argument a misfit.
    """
    wrong = [
        f"{name} is {getattr(owner, name)!r}; allowed: at least one item" for name in filled if not getattr(owner, name)
    ]
    for name, (least, most, *step) in ranges.items():
        value = getattr(owner, name)
        items = value if isinstance(value, list | tuple) else [value]
        if not all(item is None or _within(item, least, most, *step) for item in items):
            words = f"{least:,} or more" if math.isinf(most) else f"{least:,} to {most:,}"
            wrong.append(f"{name} is {value!r}; allowed: {words}" + (f", in steps of {step[0]}" if step else ""))
    if wrong:
        raise ValueError(*wrong)


def _within(item: int | float, least: int | float, most: int | float, step: int | float = 0) -> bool:
    return math.isfinite(item) and least <= item <= most and not (step and item % step)
