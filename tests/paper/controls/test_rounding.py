"""Signed rounding against hand-made grids."""

import numpy as np
import pytest

from loopq.errors import ConfigError
from loopq.paper.controls.rounding import round_signed


def test_two_bits_have_one_level_on_each_side():
    rounded = round_signed([[2.0, 0.9, 1.1, -2.0, 0.0]], 2)
    np.testing.assert_array_equal(rounded, [[2.0, 0.0, 2.0, -2.0, 0.0]])
    # q = 3 of three bits: steps of 1 for a largest value of 3; halves go to even.
    np.testing.assert_array_equal(round_signed([3.0, 0.5, 1.5, -2.4], 3), [3.0, 0.0, 2.0, -2.0])
    np.testing.assert_array_equal(round_signed(np.zeros((2, 3)), 4), np.zeros((2, 3)))


def test_groups_of_columns_have_scales_of_their_own():
    matrix = np.array([[1.0, 0.4, 8.0, 5.0, 7.0], [2.0, 2.0, -1.0, 1.0, -3.0]])
    rounded = round_signed(matrix, 2, 2)
    np.testing.assert_array_equal(rounded, [[1.0, 0.0, 8.0, 8.0, 7.0], [2.0, 2.0, -1.0, 1.0, -3.0]])
    np.testing.assert_array_equal(round_signed(matrix, 2, 1), matrix)
    whole = round_signed(matrix, 3)
    assert whole[0, 2] == 8.0
    assert whole[0, 0] == 0.0


def test_what_is_no_grid_is_refused():
    with pytest.raises(ConfigError, match="at least 2 bits; got 1"):
        round_signed([1.0], 1)
    with pytest.raises(ConfigError, match="got 2-D and 0"):
        round_signed([[1.0]], 4, 0)
    with pytest.raises(ConfigError, match="got 1-D and 4"):
        round_signed([1.0], 4, 4)


def test_rounding_is_idempotent_and_bounded():
    m = np.random.default_rng(0).normal(size=(5, 300))
    for group in (None, 128, 300):
        q = round_signed(m, 4, group)
        np.testing.assert_allclose(round_signed(q, 4, group), q, rtol=1e-12)
    q = round_signed(m, 4, 128)
    for start in (0, 128, 256):
        part = m[:, start : start + 128]
        scale = np.abs(part).max(axis=1, keepdims=True) / 7
        assert (np.abs(q[:, start : start + 128] - part) <= scale / 2 + 1e-12).all()
    assert (round_signed(np.zeros((2, 2)), 4) == 0).all()
