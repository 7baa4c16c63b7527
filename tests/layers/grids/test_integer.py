"""Signed integers: values, limits and blocks of GGUF, from first principles."""

from __future__ import annotations

import numpy as np
import pytest

from loopq.layers.grids import grid_of
from loopq.layers.grids.integer import Integer


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_a_value_is_the_code_times_its_scale(bits):
    grid = Integer(bits, 4, "float32")
    low, high = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    assert grid.limits == (low, high)
    assert grid.dtype is np.int8
    assert grid.label == f"INT{bits}"
    codes = np.array([[low, high, 0, 1, -1, 1]], np.int8)
    scales = np.float32([[0.5, 3.0]])
    expected = [[low * 0.5, high * 0.5, 0, 0.5, -3.0, 3.0]]
    assert grid.dequantize(codes, scales).tolist() == expected


def test_a_description_gives_the_grid_back():
    grid = Integer(4, 32, "float16")
    assert grid_of(grid.described()) == grid
    description = {"bits": 4, "group_size": 32, "symmetric": True, "scale_dtype": "float16"}
    assert grid_of(description) == grid
    assert grid.described() == description | {"kind": "integer"}


def test_names_and_widths_of_gguf_blocks():
    grids = {bits: Integer(bits, 32, "float16") for bits in (2, 3, 4, 8)}
    named = {bits: (grid.gguf and grid.gguf.name, grid.gguf_width) for bits, grid in grids.items()}
    assert named == {2: ("Q2_0", 64), 3: (None, 32), 4: ("Q4_0", 32), 8: ("Q8_0", 32)}


def block(bits, width):
    """Codes of one row of two blocks, their scales and the bytes of each block."""
    rng = np.random.default_rng(bits)
    grid = Integer(bits, width, "float16")
    codes = rng.integers(*grid.limits, (1, 2 * width), endpoint=True).astype(np.int8)
    scales = np.float32([[0.25, -1.5]])
    data = grid.gguf_data(codes, scales, None).reshape(2, -1)
    assert (
        data[:, :2].copy().view("<f2").ravel().tolist() == (-scales if bits == 2 else scales).ravel().tolist()
    )
    return codes.reshape(2, width), data[:, 2:]


def test_halves_of_a_byte_of_four_bits_are_half_a_block_apart():
    codes, data = block(4, 32)
    np.testing.assert_array_equal(data & 15, codes[:, :16] + 8)
    np.testing.assert_array_equal(data >> 4, codes[:, 16:] + 8)


def test_two_bit_quarters_of_a_byte_alternate_in_sign():
    codes, data = block(2, 64)
    for part in range(4):
        np.testing.assert_array_equal((data >> 2 * part & 3).astype(int) - 1, -codes[:, part::4])


def test_eight_bits_are_stored_as_they_are():
    codes, data = block(8, 32)
    np.testing.assert_array_equal(data.view(np.int8), codes)
