"""AWQ: channel scales by activation magnitude."""

from __future__ import annotations

import numpy as np
import pytest

from loopq.errors import ConfigError, SolveError
from loopq.paper.quantizers.awq import channel_scale
from tests.support.problems import solve


def test_awq_of_even_channels_is_asymmetric_rounding_or_better():
    rng = np.random.default_rng(3)
    weight = rng.normal(size=(16, 48)).astype(np.float32)
    plain = solve("rtn", weight, None, bits=3, group_size=16, symmetric=False)
    assert solve("awq", weight, np.eye(48), bits=3, group_size=16, symmetric=False).same_as(plain)
    x = rng.normal(size=(200, 48)) * np.exp(rng.normal(size=48))
    hessian = x.T @ x
    layer = solve("awq", weight, hessian, bits=3, group_size=16, symmetric=False)

    def loss(quantized):
        error = quantized.dequantize() - weight
        return np.trace(error @ hessian @ error.T)

    assert loss(layer) < loss(plain)
    assert layer.report["awq_power"] > 0


def test_scales_are_powers_of_the_magnitude_of_live_channels():
    magnitude = np.array([4.0, 0.0, 1.0, 0.25])
    np.testing.assert_allclose(channel_scale(magnitude, 0.5), [2.0, 1.0, 1.0, 0.5])
    np.testing.assert_array_equal(channel_scale(np.zeros(3), 0.5), np.ones(3, np.float32))
    assert (channel_scale(np.array([1e-5, 1e5]), 0.95) >= 2.0**-14).all()


def test_refuses_a_rotation_and_a_layer_without_activations():
    weight = np.random.default_rng(4).normal(size=(8, 16)).astype(np.float32)
    loud = np.diag(np.r_[1e4, np.ones(15)])
    with pytest.raises(ConfigError, match="method 'awq' cannot be combined with a rotation"):
        solve("awq", weight, loud, bits=3, group_size=16, rotation="random:4")
    with pytest.raises(SolveError, match="needs the layer's activations"):
        solve("awq", weight, None)
