"""What the figures of a dataclass may be. Called from its `__post_init__`, so that whoever builds it is told."""

from __future__ import annotations

import math
from collections.abc import Sequence


def require(owner: object, *, filled: Sequence[str] = (), **ranges: tuple[int | float, int | float]) -> None:
    """Fields of `owner` lie within their range [least, most], every item of a list too, and those `filled` hold items.

    Null is left to the field's type; NaN and infinity are never within. Raises ValueError with an argument a misfit.
    """
    wrong = [
        f"{name} is {getattr(owner, name)!r}; allowed: at least one item" for name in filled if not getattr(owner, name)
    ]
    for name, (least, most) in ranges.items():
        value = getattr(owner, name)
        items = value if isinstance(value, list | tuple) else [value]
        if not all(item is None or (math.isfinite(item) and least <= item <= most) for item in items):
            wrong.append(f"{name} is {value!r}; allowed: {_words(least, most)}")
    if wrong:
        raise ValueError(*wrong)


def _words(least: int | float, most: int | float) -> str:
    return f"{least:,} or more" if math.isinf(most) else f"{least:,} to {most:,}"
