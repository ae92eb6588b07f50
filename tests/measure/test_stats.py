"""Intervals, exact tests and the pass rule. `python -m pytest tests/measure/test_stats.py`"""

import math

import numpy as np
import pytest
from scipy.stats import binom

from kvdrift.measure.stats import drift, drift_bound, items_needed, mcnemar, mean_interval, percentile


def test_no_drift_in_29_items_proves_ten_percent_and_28_do_not() -> None:
    assert drift_bound(0, 29) <= 0.10 < drift_bound(0, 28)
    assert drift_bound(0, 29) == pytest.approx(1 - 0.05 ** (1 / 29))


@pytest.mark.parametrize(("drifted", "items"), [(1, 30), (3, 40), (7, 200)])
def test_bound_is_the_rate_at_which_so_few_drifts_are_as_rare_as_the_confidence_says(drifted: int, items: int) -> None:
    assert binom.cdf(drifted, items, drift_bound(drifted, items)) == pytest.approx(0.05)


def test_nothing_seen_proves_nothing() -> None:
    assert drift_bound(0, 0) == 1.0
    assert drift_bound(4, 4) == 1.0
    with pytest.raises(ValueError, match="5 of 4"):
        drift_bound(5, 4)


@pytest.mark.parametrize(("drifted", "items"), [(0, 0), (0, 5), (1, 30), (2, 10)])
def test_items_needed_is_the_fewest_that_suffice(drifted: int, items: int) -> None:
    more = items_needed(drifted, items, 0.10)
    assert drift_bound(drifted, items + more) <= 0.10 < drift_bound(drifted, items + more - 1)


def test_pass_rule_passes_fails_or_says_how_many_more() -> None:
    assert (drift(0, 29, 0.10).status, drift(0, 29, 0.10).needed) == ("pass", 0)
    assert drift(4, 30, 0.10).status == "fail"
    short = drift(0, 20, 0.10)
    assert (short.status, short.needed) == ("inconclusive", 9)
    assert drift(0, 0, 0.10).status == "inconclusive"
    assert drift(1, 1, 0.10).status == "fail"
    with pytest.raises(ValueError, match="limit is 0"):
        drift(0, 10, 0.0)


def test_mcnemar_is_the_exact_binomial_of_the_discordant_pairs() -> None:
    assert mcnemar(0, 0) == 1.0
    assert mcnemar(5, 0) == pytest.approx(2 * 0.5**5)
    assert mcnemar(3, 3) == pytest.approx(1.0)


def test_interval_is_seeded_covers_the_mean_and_is_wider_for_clusters() -> None:
    rng = np.random.default_rng(1)
    prompts = np.repeat(np.arange(20), 50)
    values = rng.normal(size=20)[prompts] + 0.1 * rng.normal(size=1000)
    alone, clustered = mean_interval(values), mean_interval(values, prompts)
    assert alone is not None
    assert clustered is not None
    assert alone == mean_interval(values)
    assert clustered.low < clustered.mean < clustered.high
    assert clustered.high - clustered.low > 3 * (alone.high - alone.low)


def test_one_prompt_carries_no_interval() -> None:
    found = mean_interval(np.arange(9.0), np.zeros(9))
    assert found is not None
    assert found.mean == 4.0
    assert math.isnan(found.low)
    assert math.isnan(found.high)


def test_interval_of_nothing_is_none_and_nan_stays_visible() -> None:
    assert mean_interval(np.array([])) is None
    found = mean_interval(np.array([0.0, math.nan]))
    assert found is not None
    assert all(math.isnan(x) for x in (found.mean, found.low, found.high))


def test_a_percentile_that_the_sample_cannot_carry_is_none() -> None:
    assert percentile(np.arange(999.0), 0.99) is None
    assert percentile(np.arange(1000.0), 0.99) == pytest.approx(989.01)
    assert percentile(np.arange(1000.0), 0.999) is None
