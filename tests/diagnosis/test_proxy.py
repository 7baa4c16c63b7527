"""The output error of a rounded layer, step by step."""

from __future__ import annotations

import numpy as np
import pytest

from loopq.diagnosis import proxy
from loopq.errors import ConfigError
from tests.support.hessians import ArrayHessians


def test_proxy_is_the_squared_output_error():
    rng = np.random.default_rng(0)
    x, d = rng.normal(size=(50, 8)), rng.normal(size=(3, 8))
    h = ArrayHessians.of_rows([x])
    d = d.astype(np.float32)
    assert proxy.step_proxies(d, h) == pytest.approx([np.sum((x @ d.T) ** 2)])
    with pytest.raises(ConfigError, match="columns of W"):
        proxy.step_proxies(d, ArrayHessians.of_rows([np.eye(7)]))


def test_step_proxies_sum_to_the_deployed_proxy():
    rng = np.random.default_rng(0)
    h = ArrayHessians.of_rows([rng.normal(size=(30, 8)) * s for s in (1.0, 3.0, 2.0)])
    d = rng.normal(size=(5, 8)).astype(np.float32)
    steps = proxy.step_proxies(d, h)
    assert steps.sum() == pytest.approx(np.trace(d @ h.matrix([0, 1, 2]) @ d.T))
    found = proxy.summarise_proxies({"a": steps, "b": steps})
    np.testing.assert_allclose(found["per_step"], 2 * steps)
    assert found["max_over_min"] == pytest.approx(steps.max() / steps.min())
    assert found["step0_share"] == pytest.approx(steps[0] / steps.sum())
    assert found["uniform_share"] == 1 / 3
    small = proxy.summarise_proxies({"a": steps / steps.sum() / 9})
    assert small["max_over_min"] == pytest.approx(steps.max() / steps.min())
    assert small["step0_share"] == pytest.approx(steps[0] / steps.sum())
    still = proxy.summarise_proxies({"a": np.zeros(2)})
    assert (still["max_over_min"], still["step0_share"]) == (None, None)


def test_magnitude_stability():
    rng = np.random.default_rng(0)
    scale = np.exp(rng.normal(size=64))
    stable = ArrayHessians.of_rows([rng.normal(size=(4000, 64)) * scale * s for s in (1.0, 20.0)])
    assert proxy.magnitude_stability(stable)["first_last"] > 0.99
    moved = ArrayHessians.of_rows([rng.normal(size=(4000, 64)) * s for s in (scale, rng.permutation(scale))])
    assert abs(proxy.magnitude_stability(moved)["first_last"]) < 0.5
    middle = ArrayHessians.of_rows([np.diag([1.0, 2, 3]), np.diag([3.0, 1, 2]), np.diag([1.0, 2, 3])])
    assert proxy.magnitude_stability(middle)["per_step"] == pytest.approx([1, -0.5, 1])
    assert proxy.magnitude_stability(middle)["first_last"] == pytest.approx(1)
    rms = proxy.channel_rms(np.diag([8.0, 0.08, -1e-12]), 2)
    assert rms == pytest.approx([2, 0.2, 0])
    assert proxy.channel_rms(np.diag([4.0]), 1) == proxy.channel_rms(np.diag([4.0]), 0) == [2.0]
    flat = ArrayHessians.of_rows([np.eye(4), np.eye(4)])
    assert proxy.magnitude_stability(flat)["first_last"] is None
