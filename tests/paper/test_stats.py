"""The statistics of the paper's tables, against its numbers, textbook values and their nominal coverage."""

import math

import numpy as np
import pytest

from loopq.errors import ConfigError
from loopq.evaluation.stats import wilson
from loopq.paper import stats


def test_cluster_bootstrap_is_wider_than_positions_would_say():
    # Twenty prompts that agree wholly or not at all: the units are prompts, not positions.
    hits = np.array([50.0, 0.0] * 10)
    sizes = np.full(20, 50.0)
    interval = stats.cluster_rate(hits, sizes, n_resamples=20_000)
    naive = wilson(500, 1000)
    assert interval.estimate == 0.5
    assert interval.high - interval.low > 5 * (naive.high - naive.low)


def test_pooled_rate_of_the_closed_loop_control():
    # 922 of 1,090 positions is the pooled 84.59 % of Li, App. J, 926 its 84.95 %.
    assert round(100 * stats.cluster_rate([922], [1090], n_resamples=10).estimate, 2) == 84.59
    assert round(100 * stats.cluster_rate([926], [1090], n_resamples=10).estimate, 2) == 84.95


def test_difference_in_differences_of_the_paper():
    # Shifts +0.080 and +0.101 at the plain state, -0.340 and -0.041 at the bypassed one.
    for plain, other, did in [(0.080, 0.101, 0.021), (-0.340, -0.041, 0.299)]:
        interval = stats.difference_in_differences([0.0], [plain], [0.0], [other], n_resamples=10)
        assert round(interval.estimate, 3) == did


def test_difference_in_differences_cancels_what_prompts_share():
    rng = np.random.default_rng(4)
    prompt = rng.normal(size=30)
    interval = stats.difference_in_differences(prompt, prompt + 1, prompt, prompt + 3, n_resamples=200)
    assert interval.estimate == pytest.approx(2.0)
    assert interval.high - interval.low < 1e-12


def test_sign_flip_of_fifty_equal_signs_has_monte_carlos_bound():
    effects = np.random.default_rng(5).uniform(0.4, 0.5, size=50)
    p = stats.sign_flip(effects)
    assert p == pytest.approx(1e-5)
    # The 3.0e-5 of Li, App. K: three radii, Holm-adjusted.
    assert stats.holm([p, p, p])[0] == pytest.approx(3.0e-5)


def test_sign_flip_counts_all_patterns_of_few_effects():
    assert stats.sign_flip([1.0] * 10) == 2 / 2**10
    assert stats.sign_flip([1.0, -1.0]) == stats.sign_flip([0.3]) == 1.0
    effects = np.random.default_rng(5).normal(0.3, 1.0, size=12)
    signs = 1 - 2 * (np.arange(2**12)[:, None] >> np.arange(12) & 1)
    exact = np.mean(np.abs(signs @ effects) >= abs(effects.sum()) - 1e-12)
    assert stats.sign_flip(effects) == exact
    assert stats.sign_flip(effects, n_resamples=4095) == pytest.approx(exact, abs=0.02)


def test_sign_flip_keeps_its_level():
    rng = np.random.default_rng(6)
    p = [stats.sign_flip(rng.normal(size=8)) for _ in range(1000)]
    assert 0.035 <= np.mean(np.array(p) <= 0.05) <= 0.065


def test_holm_textbook_and_monotone():
    np.testing.assert_allclose(stats.holm([0.01, 0.04, 0.03, 0.005]), [0.03, 0.06, 0.06, 0.02])
    np.testing.assert_allclose(stats.holm([0.6, 0.3, 0.9]), [1.0, 0.9, 1.0])
    raw = np.random.default_rng(7).uniform(size=20)
    adjusted = stats.holm(raw)
    assert (adjusted >= raw).all()
    assert (np.diff(adjusted[np.argsort(raw)]) >= 0).all()


@pytest.mark.parametrize(
    ("value", "rtn", "base", "percent"),
    [
        (462, 368, 460, 102.17), (597, 521, 662, 53.9), (12.97, 14.38, 11.51, 49.1), (11.62, 11.94, 10.10, 17.4),
        (34.08, 35.10, 31.80, 30.9), (39.21, 46.08, 38.46, 90.2), (20.84, 51.30, 19.57, 96.0),
        (12.24, 12.61, 11.75, 43.0),
        (11.5932, 13.1284, 10.5033, 58.48),
    ],
)  # fmt: skip
def test_gap_closed_of_the_paper(value, rtn, base, percent):
    digits = len(str(percent).split(".")[1])
    assert round(100 * stats.gap_closed(value, rtn, base), digits) == percent


def test_gap_closed_of_its_own_ends():
    assert stats.gap_closed(5.0, 9.0, 5.0) == 1.0
    assert math.copysign(1.0, stats.gap_closed(9.0, 9.0, 5.0)) == 1.0
    assert stats.gap_closed(9.0, 9.0, 5.0) == 0.0
    with pytest.raises(ConfigError, match="no gap"):
        stats.gap_closed(1.0, 2.0, 2.0)


def test_student_covers_as_it_says():
    rng = np.random.default_rng(1)
    for n in (2, 3, 5, 20):
        intervals = [stats.student(row) for row in rng.normal(3.0, 2.0, (2000, n))]
        assert 0.935 <= np.mean([i.low <= 3.0 <= i.high for i in intervals]) <= 0.965


def test_student_by_its_formula():
    interval = stats.student([0.50, 0.52, 0.54])
    # t of two degrees of freedom is 4.302653; s / sqrt(3) is 0.02 / sqrt(3).
    half = 4.302653 * 0.02 / math.sqrt(3)
    assert (interval.low, interval.high) == (pytest.approx(0.52 - half), pytest.approx(0.52 + half))
    assert (interval.n, interval.level, stats.student([1.0, 3.0]).estimate) == (3, 0.95, 2.0)


def test_student_needs_a_second_value():
    with pytest.raises(ConfigError, match="at least 2 values; got 1"):
        stats.student([1.0])


@pytest.mark.parametrize("call", [lambda: stats.holm([1.2]), lambda: stats.holm([-0.1, 0.5])])
def test_impossible_input_is_refused(call):
    with pytest.raises(ConfigError):
        call()


def test_holm_keeps_values_at_the_ends():
    assert stats.holm([0.0, 1.0]).tolist() == [0.0, 1.0]
