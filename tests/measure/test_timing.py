"""Paired timing and what is told of it. `python -m pytest tests/measure/test_timing.py`"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvdrift.measure.timing import Pairs, p95_ratio, paired, percentile, ratio

CPU = torch.device("cpu")


def test_both_sides_run_equally_often_and_in_random_order() -> None:
    calls: list[str] = []
    pairs = paired(lambda: calls.append("r"), lambda: calls.append("c"), 40, seed=0, device=CPU, warmup=3)
    timed = calls[6:]
    assert len(pairs.reference) == len(pairs.candidate) == 40
    assert calls.count("r") == calls.count("c") == 43
    firsts = timed[::2]
    assert all({a, b} == {"r", "c"} for a, b in zip(timed[::2], timed[1::2], strict=True))
    assert 8 < firsts.count("r") < 32


def test_ratio_is_of_pairs_and_its_interval_holds_it() -> None:
    slow = np.random.default_rng(0).uniform(1, 10, 60)  # the machine varies; both sides of a pair vary with it
    estimate = ratio(Pairs(tuple(slow), tuple(0.5 * slow)), seed=0)
    assert estimate.value == estimate.low == estimate.high == pytest.approx(0.5)
    noisy = ratio(Pairs(tuple(slow), tuple(slow * np.random.default_rng(1).normal(0.5, 0.05, 60))), seed=0)
    assert noisy.low < noisy.value < noisy.high
    assert noisy.high - noisy.low < 0.1


@pytest.mark.parametrize(("steps", "q", "known"), [(19, 95, False), (20, 95, True), (999, 99, False), (1000, 99, True)])
def test_a_percentile_that_so_few_steps_cannot_carry_is_null(steps: int, q: int, known: bool) -> None:
    times = tuple(np.linspace(1, 2, steps))
    assert (percentile(times, q) is not None) == known
    if q == 95:
        assert (p95_ratio(Pairs(times, times), seed=0) is not None) == known


def test_visits_that_differ_widen_the_interval() -> None:
    """Steps of one visit agree among themselves; a next run that differs as visits do must not fall outside."""
    candidate = tuple(np.repeat([0.9, 1.0, 1.1, 1.2], 16) * np.random.default_rng(0).normal(1, 0.01, 64))
    reference = (1.0,) * 64
    one, four = (ratio(Pairs(reference, candidate, visits), seed=0) for visits in (1, 4))
    assert one.value == four.value
    assert four.high - four.low > 1.5 * (one.high - one.low)


@given(visits=st.integers(1, 5), each=st.integers(1, 6))
def test_a_draw_takes_as_many_pairs_from_whole_visits(visits: int, each: int) -> None:
    times = (1.0,) * (visits * each)
    drawn = Pairs(times, times, visits).draws(50, np.random.default_rng(0))
    assert drawn.shape == (50, visits * each)
    by_visit = drawn.reshape(50, visits, each) // each
    assert (by_visit == by_visit[:, :, :1]).all()
    assert set(drawn.flatten().tolist()) <= set(range(visits * each))
