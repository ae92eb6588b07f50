"""The break-even length. `python -m pytest tests/measure/test_breakeven.py`"""

from __future__ import annotations

import numpy as np
import pytest

from kvdrift.measure.breakeven import Line, break_even, crossing
from kvdrift.measure.timing import Pairs

LENGTHS = (128, 1024, 4096, 8192)


def measured(reference: Line, candidate: Line, noise: float = 0.01) -> dict[int, Pairs]:
    rng = np.random.default_rng(0)
    return {
        n: Pairs(*(tuple((x.intercept + x.slope * n) * rng.normal(1, noise, 12)) for x in (reference, candidate)))
        for n in LENGTHS
    }


@pytest.mark.parametrize("length", [500, 1500, 6000])
def test_a_planted_crossing_is_found_within_its_interval(length: int) -> None:
    found = break_even(measured(Line(40.0, 0.01), Line(40.0 + 0.005 * length, 0.005)), limit=8192, seed=0)
    assert found.verdict == "crosses"
    assert found.low is not None
    assert found.high is not None
    assert found.low <= length <= found.high
    assert found.tokens == pytest.approx(length, rel=0.4)


def test_a_candidate_slower_everywhere_has_no_break_even() -> None:
    """Case 14."""
    found = break_even(measured(Line(40.0, 0.01), Line(60.0, 0.012)), limit=8192, seed=0)
    assert (found.verdict, found.tokens, found.confidence) == ("never", None, 1.0)


def test_a_crossing_beyond_the_longest_length_is_never() -> None:
    assert crossing(Line(40.0, 0.01), Line(140.0, 0.0), limit=8192) == ("never", None)
    assert crossing(Line(40.0, 0.01), Line(140.0, 0.0), limit=16384) == ("crosses", 10000)


def test_always_and_only_for_short_prompts() -> None:
    assert crossing(Line(40.0, 0.01), Line(30.0, 0.005), limit=8192) == ("always", 0)
    assert crossing(Line(40.0, 0.005), Line(30.0, 0.010), limit=8192) == ("never", None)


def test_one_length_is_no_line() -> None:
    with pytest.raises(ValueError, match="two lengths"):
        break_even({128: Pairs((1.0,), (1.0,))}, limit=8192, seed=0)
