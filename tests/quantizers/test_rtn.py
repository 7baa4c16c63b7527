"""Rounding to nearest."""

from __future__ import annotations

import numpy as np
import pytest

from loopq.errors import ConfigError
from tests.support.problems import solve


def test_rtn_is_idempotent_and_within_half_a_step():
    rng = np.random.default_rng(7)
    weight = rng.normal(size=(16, 90)).astype(np.float32)
    layer = solve("rtn", weight, None, bits=4, group_size=32, scale_dtype="float32")
    again = solve("rtn", layer.dequantize(), None, bits=4, group_size=32, scale_dtype="float32")
    np.testing.assert_array_equal(again.dequantize(), layer.dequantize())
    step = np.repeat(layer.scales, [32, 32, 26], axis=1)
    assert (np.abs(weight - layer.dequantize()) <= step * 0.5000001).all()


def test_a_searched_scale_has_at_most_the_error_of_the_maximum():
    rng = np.random.default_rng(8)
    weight = rng.standard_t(3, size=(16, 96)).astype(np.float32)
    error = {
        search: np.square(
            solve("rtn", weight, None, bits=3, group_size=32, scale_search=search).dequantize() - weight
        ).sum()
        for search in ("max", "mse")
    }
    assert error["mse"] < 0.9 * error["max"]
    with pytest.raises(ConfigError, match="scale_search must be one of max, half-range, mse; got 'l1'"):
        solve("rtn", weight, None, scale_search="l1")
