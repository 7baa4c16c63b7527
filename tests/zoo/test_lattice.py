"""The test for an old rounding: it finds grids of any scale and offset, and finds none in other weights."""

from __future__ import annotations

import numpy as np

from benches.zoo.lattice import gap, kurtosis, shares

RNG = np.random.default_rng(0)


def grid(levels: int) -> np.ndarray:
    """Groups on grids of their own scale and offset."""
    codes = RNG.integers(0, levels, (200, 32))
    return codes * RNG.uniform(0.01, 0.1, (200, 1)) + RNG.normal(0, 1, (200, 1))


def test_weights_on_sixteen_or_fewer_levels_have_no_distance() -> None:
    for levels in (16, 11, 9):
        assert np.abs(shares(grid(levels))).max() < 1e-6


def test_a_gap_is_large_on_a_grid_and_small_off_it() -> None:
    assert gap(grid(16)) > 0.9
    assert gap(grid(16) + RNG.uniform(-0.002, 0.002, (200, 32))) > 0.3
    assert gap(RNG.standard_normal((200, 32))) < 0.03
    # Heavy tails are no grid.
    assert gap(RNG.standard_t(5, (200, 32))) < 0.06


def test_kurtosis_is_three_of_normal_numbers() -> None:
    assert abs(kurtosis(RNG.standard_normal((300, 300))) - 3) < 0.1
    assert kurtosis(RNG.standard_t(5, (300, 300))) > 4
