"""The statistics against the tables of the paper, textbook values and their nominal coverage."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loopq.errors import ConfigError
from loopq.evaluation import stats


@pytest.mark.parametrize(
    ("successes", "trials", "low", "high"),
    [
        (460, 1319, 32.4, 37.5), (368, 1319, 25.5, 30.4), (355, 1319, 24.6, 29.4), (462, 1319, 32.5, 37.6),
        (662, 1319, 47.5, 52.9), (521, 1319, 36.9, 42.2), (531, 1319, 37.6, 42.9), (597, 1319, 42.6, 48.0),
        (25, 100, 17.5, 34.3), (28, 100, 20.1, 37.5), (30, 100, 21.9, 39.6), (32, 100, 23.7, 41.7),
    ],
)  # fmt: skip
def test_wilson_gives_the_intervals_of_the_paper(successes, trials, low, high):
    interval = stats.wilson(successes, trials)
    assert round(100 * interval.low, 1) == low
    assert round(100 * interval.high, 1) == high
    assert interval.estimate == successes / trials


def test_wilson_covers_as_it_says():
    rng = np.random.default_rng(0)
    for p in (0.08, 0.35, 0.5):
        drawn = rng.binomial(1319, p, size=4000)
        values, counts = np.unique(drawn, return_counts=True)
        inside = [stats.wilson(int(k), 1319).low <= p <= stats.wilson(int(k), 1319).high for k in values]
        assert 0.94 <= np.average(inside, weights=counts) <= 0.96


def test_wilson_ends_stay_in_the_unit_interval():
    assert stats.wilson(0, 10).low == 0.0
    assert stats.wilson(0, 10).high == pytest.approx(0.2775, abs=1e-4)
    assert stats.wilson(10, 10).high == 1.0


@pytest.mark.parametrize(
    ("b", "c", "p", "digits"),
    [(225, 29, 9.346e-39, 4), (251, 29, 2.718e-45, 4), (154, 111, 0.009747, 4), (68, 55, 0.28, 2), (68, 54, 0.24, 2)],
)  # fmt: skip
def test_mcnemar_gives_the_p_values_of_the_paper(b, c, p, digits):
    assert float(f"{stats.mcnemar_exact(b, c):.{digits - 1}e}") == p


@given(st.integers(0, 400), st.integers(0, 400))
def test_mcnemar_is_symmetric_and_a_probability(b, c):
    p = stats.mcnemar_exact(b, c)
    assert p == stats.mcnemar_exact(c, b)
    assert 0 < p <= 1
    if b == c:
        assert p == 1.0
    # The definition, summed in integers.
    exact = min(1.0, 2 * sum(math.comb(b + c, k) for k in range(min(b, c) + 1)) / 2 ** (b + c))
    assert p == pytest.approx(exact, rel=1e-12)


@pytest.mark.parametrize(
    ("b", "c", "low", "high"), [(225, 29, 12.66, 17.06), (251, 29, 14.56, 19.18), (154, 111, 0.83, 5.69)]
)
def test_paired_bootstrap_gives_the_intervals_of_the_paper(b, c, low, high):
    interval = stats.paired_proportion_difference(b, c, 1319)
    # Differences lie on a lattice of 100/1319 points; an end may fall on the next lattice point.
    lattice = 100 / 1319
    assert 100 * interval.low == pytest.approx(low, abs=1.05 * lattice)
    assert 100 * interval.high == pytest.approx(high, abs=1.05 * lattice)
    assert interval.estimate == (b - c) / 1319


def test_bootstraps_repeat_with_their_seed_and_say_it():
    values = np.random.default_rng(1).normal(size=40)
    one, again = (
        stats.mean_interval(values, n_resamples=2000, seed=5),
        stats.mean_interval(values, n_resamples=2000, seed=5),
    )
    assert one == again
    assert (one.seed, one.n_resamples, one.n) == (5, 2000, 40)
    assert one != stats.mean_interval(values, n_resamples=2000, seed=6)


def test_bootstrap_resamples_units_with_all_their_columns():
    rng = np.random.default_rng(8)
    a, b = rng.normal(5.0, 1.0, size=(2, 30))
    interval = stats.bootstrap(
        [a, b], lambda x, y, axis: x.mean(axis) / y.mean(axis), n_resamples=500, seed=3
    )
    picks = np.random.default_rng(3).integers(0, 30, size=(500, 30))
    draws = a[picks].mean(axis=1) / b[picks].mean(axis=1)
    assert (interval.low, interval.high) == pytest.approx(
        tuple(np.quantile(draws, [0.025, 0.975])), rel=1e-12
    )
    assert interval.estimate == a.mean() / b.mean()


def test_bootstrap_of_one_unit_is_the_estimate():
    interval = stats.mean_interval([3.0], n_resamples=10)
    assert (interval.estimate, interval.low, interval.high) == (3.0, 3.0, 3.0)


def test_bootstrap_of_a_mean_has_the_width_of_theory():
    values = np.random.default_rng(2).normal(3.0, 2.0, size=400)
    interval = stats.mean_interval(values, n_resamples=20_000)
    half = 1.96 * values.std() / math.sqrt(400)
    assert interval.high - interval.low == pytest.approx(2 * half, rel=0.03)
    assert interval.estimate == pytest.approx(values.mean())


def test_chunked_resampling_covers_every_draw(monkeypatch):
    values = np.random.default_rng(2).normal(size=50)
    whole = stats.mean_interval(values, n_resamples=999)
    monkeypatch.setattr(stats, "CHUNK", 50 * 7)
    assert stats.mean_interval(values, n_resamples=999) == whole


def test_geometric_mean_ratio_is_scale_free():
    rng = np.random.default_rng(3)
    base = rng.lognormal(size=60)
    interval = stats.geometric_mean_ratio(base * 1.989, base, n_resamples=500)
    assert interval.estimate == pytest.approx(1.989)
    assert interval.low == pytest.approx(1.989)
    noisy = stats.geometric_mean_ratio(base * np.exp(rng.normal(0.5, 0.2, 60)), base, n_resamples=5000)
    assert noisy.low < np.exp(0.5) < noisy.high


def test_attenuations_of_the_paper():
    assert (
        round(100 * (1 - stats.geometric_mean_ratio([0.713216], [1.22249], n_resamples=1).estimate), 2)
        == 41.66
    )
    assert (
        round(100 * (1 - stats.geometric_mean_ratio([0.6366], [1.0169], n_resamples=1).estimate), 2) == 37.40
    )


def test_correlations_by_their_formulas():
    x, y = [1, 2, 2, 3, 5, 8], [2, 1, 4, 4, 9, 7]
    assert stats.pearson(x, y) == pytest.approx(np.corrcoef(x, y)[0, 1])
    # Ties share their mean rank.
    assert stats.spearman(x, y) == pytest.approx(
        np.corrcoef([1, 2.5, 2.5, 4, 5, 6], [2, 1, 3.5, 3.5, 6, 5])[0, 1]
    )
    assert stats.spearman([1, 2, 3], [10, 100, 1000]) == pytest.approx(1.0)
    assert stats.spearman([1, 1, 2], [5, 5, 9]) == pytest.approx(1.0)
    assert math.isnan(stats.spearman([1, 1, 1], [1, 2, 3]))
    assert math.isnan(stats.pearson([1, 2, 3], [4, 4, 4]))
    assert math.isnan(stats.pearson([1.0], [2.0]))
    assert stats.pearson([1.0, 2.0], [5.0, 3.0]) == pytest.approx(-1.0)


@pytest.mark.parametrize(
    "call",
    [
        lambda: stats.wilson(3, 2),
        lambda: stats.wilson(-1, 2),
        lambda: stats.wilson(0, 0),
        lambda: stats.mcnemar_exact(-1, 2),
        lambda: stats.mcnemar_exact(2, -1),
        lambda: stats.paired_proportion_difference(5, 6, 10),
        lambda: stats.paired_proportion_difference(-1, 6, 10),
        lambda: stats.paired_proportion_difference(0, 0, 0),
        lambda: stats.geometric_mean_ratio([1.0], [0.0]),
        lambda: stats.geometric_mean_ratio([0.0], [1.0]),
        lambda: stats.geometric_mean_ratio([1.0, 2.0], [1.0]),
        lambda: stats.mean_interval([]),
        lambda: stats.mean_interval([1.0, math.nan]),
    ],
)
def test_impossible_input_is_refused(call):
    with pytest.raises(ConfigError):
        call()


def test_values_at_the_ends_are_allowed():
    assert stats.paired_proportion_difference(5, 5, 10, n_resamples=100).estimate == 0.0
    assert stats.paired_proportion_difference(0, 1, 1, n_resamples=100).low == -1.0
    assert (stats.mcnemar_exact(0, 0), stats.mcnemar_exact(0, 3)) == (1.0, 0.25)
    assert stats.wilson(1, 1).low == pytest.approx(1 / (1 + 1.959964**2))
