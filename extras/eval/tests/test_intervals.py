"""Intervals against other ways to compute them."""

import numpy as np
import pytest
from scipy import stats

from ragcache_eval.intervals import bootstrap, estimate, wilson


@pytest.mark.parametrize(("right", "asked"), [(0, 10), (1, 10), (5, 10), (10, 10), (991, 1000)])
def test_wilson_is_where_the_score_test_just_rejects(right, asked):
    """The ends p of the interval solve |right/asked - p| = z sqrt(p (1 - p) / asked)."""
    low, high = wilson(right, asked)
    expected = stats.binomtest(right, asked).proportion_ci(0.95, method="wilson")
    assert (low, high) == pytest.approx((expected.low, expected.high), abs=1e-6)


def test_bootstrap_has_the_width_of_the_normal_interval():
    values = np.random.default_rng(1).normal(3.0, 2.0, size=400)
    low, high = bootstrap(list(values))
    half = 1.96 * values.std() / 20
    assert (low, high) == pytest.approx((values.mean() - half, values.mean() + half), rel=0.02)
    assert bootstrap(list(values)) == (low, high)


def test_values_of_one_cluster_are_not_independent():
    values = [float(i % 2) for i in range(40) for _ in range(10)]
    clusters = [i for i in range(40) for _ in range(10)]
    alone, together = bootstrap(values), bootstrap(values, clusters)
    assert together[1] - together[0] > 2.5 * (alone[1] - alone[0])  # sqrt(10) = 3.2


def test_estimate_takes_wilson_for_independent_booleans():
    found = estimate([True] * 9 + [False])
    assert (found.mean, found.size) == (0.9, 10)
    assert (found.low, found.high) == wilson(9, 10)
    repeated = estimate([True] * 9 + [False], ["a"] * 5 + ["b"] * 5)
    assert (repeated.low, repeated.high) != wilson(9, 10)


def test_nothing_has_no_mean():
    with pytest.raises(ValueError, match="nothing"):
        estimate([])
