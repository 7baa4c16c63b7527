"""The metric between outputs and inputs: what scalings and rotations do to it, and rows without gradients."""

from __future__ import annotations

import numpy as np

from loopq.quantizers.loop_metric import FLOOR, LoopMetric, inverse, ridged
from tests.support.problems import solve


def test_follows_scalings_and_rotations():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(30, 6))
    h, r = x.T @ x, np.diag(rng.uniform(1, 2, size=6))
    by = np.array([1.0, 1.0, 1e6, 1.0, 1.0, 1e-3])
    turn = by * by[:, None]
    np.testing.assert_allclose(inverse(h * turn, 0.01) * turn, inverse(h, 0.01), rtol=1e-6)
    np.testing.assert_allclose(inverse(h, 0.01) @ ridged(h, 0.01), np.eye(6), atol=1e-10)
    plain = LoopMetric((np.eye(3),), r, 1).combined(h)
    np.testing.assert_allclose(
        LoopMetric((np.eye(3),), r * turn, 1).combined(h * turn), plain * turn, rtol=1e-9
    )
    dead = np.diag([1.0, 0.0])
    np.testing.assert_array_equal(ridged(dead, 0.5), np.diag([1.5, 0.5]))


def test_another_basis_keeps_the_scale_of_both_parts():
    """The median of the ratios is another one in a rotated basis, so both parts are added before."""
    metric = LoopMetric((np.eye(3),), np.diag([1.0, 3.0, 4.0]), 1)
    h = np.diag([1.0, 1.0, 2.0])
    united, rest = metric.united(h)
    np.testing.assert_array_equal(united, np.diag([3.0, 5.0, 8.0]))
    np.testing.assert_array_equal(rest.combined(united), united)
    assert rest.sums is metric.sums


def test_sums_in_single_precision_are_doubled_before_the_ridge():
    sums = np.random.default_rng(0).normal(size=(5, 5)).astype(np.float32)
    sums = sums @ sums.T
    (left,) = LoopMetric((sums,), sums, 1, 0.1).left
    np.testing.assert_array_equal(left, ridged(sums.astype(np.float64), 0.1))
    h = np.eye(5) / 3
    wide = LoopMetric((), sums.astype(np.float64), 1).combined(h)
    np.testing.assert_array_equal(LoopMetric((), sums, 1).combined(h), wide)


def test_rows_without_gradient_take_no_errors_of_others(monkeypatch):
    """Four rows move with the others by 1e-4: second order lets them take any error, and is wrong so far away."""
    rng = np.random.default_rng(0)
    seen = rng.normal(size=(8, 50))
    gradients = np.concatenate([seen, 1e-4 * rng.normal(size=(4, 8)) @ seen])
    left = ridged(gradients @ gradients.T, 0.1)
    weight = rng.normal(size=(12, 32)).astype(np.float32)
    x = rng.normal(size=(200, 32))
    metric = LoopMetric((left,), np.zeros((32, 32)), 200)

    def error(floor: float) -> float:
        monkeypatch.setattr("loopq.quantizers.loop_metric.FLOOR", floor)
        settings = {"bits": 3, "group_size": 32, "metric": "loop"}
        rounded = solve("gptq-cd", weight, x.T @ x, threads=1, loop_metric=metric, **settings).dequantize()
        return float(np.square(rounded[8:] - weight[8:]).sum() / np.square(weight[8:]).sum()) ** 0.5

    assert error(FLOOR) < 0.5 < 2.0 < error(0.0)
