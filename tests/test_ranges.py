"""Ranges of a dataclass's figures. `python -m pytest tests/test_ranges.py`"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import pytest

from kvdrift.ranges import require


@dataclass(frozen=True)
class Demo:
    count: int = 1
    share: float = 0.5
    many: list[int] = field(default_factory=lambda: [1])
    length: int = 16
    maybe: int | None = None

    def __post_init__(self) -> None:
        require(
            self, filled=("many",), count=(1, math.inf), share=(0, 1), many=(1, 8), length=(16, 2048, 16), maybe=(1, 2)
        )


@pytest.mark.parametrize(
    ("values", "wrong"),
    [
        ({}, []),
        ({"count": 10**9, "share": 1, "many": [1, 8], "length": 2048, "maybe": 2}, []),
        ({"count": 0}, ["count is 0; allowed: 1 or more"]),
        ({"share": 1.01}, ["share is 1.01; allowed: 0 to 1"]),
        ({"share": math.nan}, ["share is nan; allowed: 0 to 1"]),
        ({"count": math.inf}, ["count is inf; allowed: 1 or more"]),
        ({"many": []}, ["many is []; allowed: at least one item"]),
        ({"many": [1, 9]}, ["many is [1, 9]; allowed: 1 to 8"]),
        ({"length": 24}, ["length is 24; allowed: 16 to 2,048, in steps of 16"]),
        ({"maybe": 3, "count": -1}, ["count is -1; allowed: 1 or more", "maybe is 3; allowed: 1 to 2"]),
    ],
)
def test_each_misfit_is_named_with_what_is_allowed(values: dict[str, object], wrong: list[str]) -> None:
    if not wrong:
        assert Demo(**values)
        return
    with pytest.raises(ValueError, match="allowed") as caught:
        Demo(**values)
    assert list(caught.value.args) == wrong
